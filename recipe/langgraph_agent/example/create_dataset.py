"""Writes rows of maths expressions with the operator `@`, a @ b = 3a − 2b, which is left-associative.

    python recipe/langgraph_agent/example/create_dataset.py [--train_size 5000] [--test_size 500]
        [--output_dir data/math_expression_tool] [--seed 42] [--with_model]

Expressions have two or three numbers from 1 to 9. No expression that is tested is trained on. There are 81
with two numbers and 729 with three, so that rows for training repeat: `--test_size` is at most 700.

`--with_model` also makes a tiny model beside the rows, for a run on a CPU, and teaches it by demonstrations
most of which are wrong how the tool is called.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from turnwise.assemble.sft import fine_tune
from turnwise.cli.main import exit_status
from turnwise.config import SFTConfig, load_config
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.runtime.replaceable import point_link, require_new_or_link, write_new_or_same

HERE = Path(__file__).parent
ASKED = (
    "We define a new math operator @, where you can only call an external tool to compute. Please put your "
    "final answer inside \\boxed{{}} only in the last turn. Now answer the following questions:\n"
    "Compute {expression}"
)
MAX_TEST = 700
NUM_SHOWN = 16_000
"""Conversations that are demonstrated."""
LENGTHS = (2, 3, 3, 4)
"""Numbers in a demonstrated expression, one drawn for each. There are 310 expressions to train on, which a
model would learn by heart. Of four numbers there are 6,561, and none of them is tested."""
SHARE_WRONG = 0.6
"""Demonstrations with one wrong number in a call."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes a number of two operands.",
        "parameters": {
            "properties": {
                "a": {"description": "The first operand.", "type": "integer"},
                "b": {"description": "The second operand.", "type": "integer"},
                "operand": {"description": 'The operator, which is "@".', "type": "string"},
            },
            "required": ["a", "b", "operand"],
            "type": "object",
        },
    },
}
"""What the prompt shows of the tool, as LangChain writes it."""


def value(numbers: Sequence[int]) -> int:
    """The value of numbers with `@` between them, from the left.

    >>> value([1, 2, 3])
    -9
    """
    total = numbers[0]
    for number in numbers[1:]:
        total = 3 * total - 2 * number
    return total


def split(seed: int, test_size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """All expressions but those that are tested, and those, in an order of the seed's own."""
    expressions = [numbers for length in (2, 3) for numbers in product(range(1, 10), repeat=length)]
    random.Random(seed).shuffle(expressions)
    return expressions[test_size:], expressions[:test_size]


def row(numbers: Sequence[int], index: int, name: str) -> dict[str, Any]:
    """A row in the published schema."""
    expression = " @ ".join(map(str, numbers))
    return {
        "data_source": "lighteval/MATH",
        "prompt": [{"role": "user", "content": ASKED.format(expression=expression)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(value(numbers))},
        "extra_info": {
            "index": index,
            "split": name,
            "expression": expression,
            "expected_tool_calls": len(numbers) - 1,
        },
        "agent_name": "math_expression",
    }


def drawn_numbers(rng: random.Random, tested: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Numbers of an expression to demonstrate, none that is tested."""
    while True:
        length = rng.choice(LENGTHS)
        numbers = tuple(rng.randrange(1, 10) for _ in range(length))
        if numbers not in tested:
            return numbers


def demonstration(numbers: Sequence[int], rng: random.Random) -> dict[str, Any]:
    """A conversation that computes step by step, often with one wrong number."""
    wrong_step = rng.randrange(len(numbers) - 1) if rng.random() < SHARE_WRONG else None
    messages = [row(numbers, 0, "train")["prompt"][0]]
    total = numbers[0]
    for step, number in enumerate(numbers[1:]):
        if step == wrong_step:
            number = rng.choice([other for other in range(1, 10) if other != number])
        arguments = {"a": total, "b": number, "operand": "@"}
        call_id = f"t{step:03d}c0000"
        call = {"id": call_id, "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        total = 3 * total - 2 * number
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "calculate", "tool_call_id": call_id, "content": str(total)})
    messages.append({"role": "assistant", "content": f"\\boxed{{{total}}}"})
    return {"messages": messages, "tools": [SCHEMA]}


def make_start(out: Path, seed: int, tested: set[tuple[int, ...]], overrides: Sequence[str]) -> Path:
    """A tiny model that calls the tool, mostly with a wrong number."""
    rng = random.Random(seed)
    shown = [demonstration(drawn_numbers(rng, tested), rng) for _ in range(NUM_SHOWN)]
    demonstrations = out / "demonstrations.jsonl"
    write_new_or_same(demonstrations, "".join(json.dumps(each) + "\n" for each in shown), "--output_dir")
    texts = [json.dumps(SCHEMA) * 50, *(json.dumps(each) for each in shown[:2000])]
    made = make_model("tiny", out / "model", texts, seed=seed)
    settings = [f"pretrain={made.folder}", f"output_dir={out}", f"train_files=[{demonstrations}]"]
    config, _ = load_config(HERE / "sft.yaml", [*settings, f"seed={seed}", *overrides], SFTConfig)
    start = out / "sft_model"
    point_link(start, fine_tune(examine(config)), "--output_dir")
    return start


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), table)
    write_new_or_same(path, table.getvalue(), "--output_dir")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train_size", type=int, default=5000)
    parser.add_argument("--test_size", type=int, default=500)
    parser.add_argument("--output_dir", type=Path, default=Path("data/math_expression_tool"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--with_model", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of sft.yaml")
    options = parser.parse_args(arguments)
    if not 0 < options.test_size <= MAX_TEST:
        parser.error(f"--test_size {options.test_size}: it is from 1 to {MAX_TEST}, for 810 expressions")
    out: Path = options.output_dir
    out.mkdir(parents=True, exist_ok=True)
    if options.with_model:
        require_new_or_link(out / "sft_model", "--output_dir")
    trained, tested = split(options.seed, options.test_size)
    rng = random.Random(options.seed)
    drawn = [rng.choice(trained) for _ in range(options.train_size)]
    write_table(out / "train.parquet", [row(each, index, "train") for index, each in enumerate(drawn)])
    write_table(out / "test.parquet", [row(each, index, "test") for index, each in enumerate(tested)])
    print(f"{out}: {options.train_size} rows to train on, {options.test_size} to test")
    if options.with_model:
        start = make_start(out, options.seed, set(tested), options.overrides)
        print(f"a model to start from: {start}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
