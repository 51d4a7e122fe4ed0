"""Word problems with one tool: a tiny model with random weights, imitation, reinforcement, evaluation,
export.

python examples/rl_tool/quick_start.py [--out DIR] [--only-model]

All six stages: python examples/rl_tool/quick_start.py --only-model && turnwise pipeline
examples/rl_tool/pipeline.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from turnwise import RLTrainingTool
from turnwise.cli.main import exit_status
from turnwise.data.gsm8k import generate_problems, prompt_of
from turnwise.models.make import make_model
from turnwise.runtime.replaceable import write_new_or_same

NUM_TRAIN, NUM_TEST = 10_000, 400
SIZES = {"steps": (1, 2), "largest": 29, "operations": "+"}
"""One or two additions of numbers below 30. One pair of operands in five is in test problems only."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/rl_tool"))
    parser.add_argument(
        "--only-model", action="store_true", help="make the model and the problems, train nothing"
    )
    options = parser.parse_args()
    out = options.out
    problems = {
        "train": generate_problems(NUM_TRAIN, **SIZES),
        "test": generate_problems(NUM_TEST, "test", **SIZES),
    }
    for split, rows in problems.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_new_or_same(out / "problems" / f"{split}.jsonl", text, "--out")
    if not (out / "model").exists():
        texts = [
            f"{prompt_of(row['question'])} {row['answer']} Final Answer:" for row in problems["train"][:2000]
        ]
        make_model("tiny", out / "model", texts)
    if options.only_model:
        return 0
    tool = RLTrainingTool()
    sizes = {"dataset": str(out / "problems"), "max_samples": 64, "num_epochs": 1, "batch_size": 8}
    calls = [
        {
            "action": "train",
            "algorithm": "sft",
            "model_name": str(out / "model"),
            "output_dir": str(out / "sft"),
            **sizes,
        },
        {
            "action": "train",
            "algorithm": "grpo",
            "model_name": str(out / "sft"),
            "output_dir": str(out / "grpo"),
            "max_new_tokens": 40,
            **sizes,
        },
        {
            "action": "evaluate",
            "model_path": str(out / "grpo"),
            "dataset": str(out / "problems"),
            "max_samples": 20,
            "max_new_tokens": 40,
        },
        {"action": "export", "model_path": str(out / "grpo"), "output_dir": str(out / "exported")},
    ]
    for call in calls:
        answer = tool.run(call)
        print(answer)
        if json.loads(answer)["status"] == "error":
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
