"""GSM8K as rows for an agent with tools, in the published schema.

    python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_dataset_path DIR [--local_save_dir DIR]

DIR holds the raw data as `train` and `test`: JSONL or Parquet with the columns `question` and `answer`, whose
answers end with `#### n`. Without --local_dataset_path it is `openai/gsm8k` of the Hugging Face hub.
`train.parquet` and `test.parquet` are written to ~/data/gsm8k.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from turnwise.cli.main import exit_status
from turnwise.data.tables import read_tables
from turnwise.errors import DataError
from turnwise.runtime.replaceable import write_new_or_same

TOOL = "calc_gsm8k_reward"
SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. Reasoning step "
    f"by step before any tool call. You should use the `{TOOL}` tool after step by step solving the "
    "question, before generate final answer at least once and refine your answer if necessary. Put your "
    "final answer in the format of `#### <answer>`."
)


def row_of(raw: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """A row in the published schema."""
    question, answer = str(raw["question"]), str(raw["answer"])
    _, mark, solution = answer.rpartition("####")
    if not mark:
        raise DataError(f"{split}, row {index + 1}: the answer has no '#### n' at its end")
    ground_truth = solution.strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {
                "role": "user",
                "content": f"{question} Let's think step by step and output the final answer after `####`.",
            },
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": ground_truth}}},
        },
    }


def source_of(folder: str | None, split: str) -> str:
    """The name under which the raw rows of a split are read."""
    if folder is None:
        return f"openai/gsm8k:main:{split}"
    found = [
        path
        for path in sorted(Path(folder).expanduser().glob(f"{split}*"))
        if path.suffix in (".jsonl", ".parquet")
    ]
    if not found:
        raise DataError(f"{folder}: there is no {split}.jsonl and no {split}.parquet")
    return str(found[0])


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), table)
    write_new_or_same(path, table.getvalue(), "--local_save_dir")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_dataset_path", metavar="DIR", help="folder of the raw data")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/gsm8k"), metavar="DIR")
    options = parser.parse_args(arguments)
    for split in ("train", "test"):
        rows = read_tables([source_of(options.local_dataset_path, split)], "--local_dataset_path")
        out = options.local_save_dir.expanduser() / f"{split}.parquet"
        write(out, (row_of(row.columns, split, index) for index, row in enumerate(rows)))
        print(f"{out}: {len(rows)} rows")


if __name__ == "__main__":
    sys.exit(exit_status(main))
