"""Products of two numbers as rows whose prompts show how the calculator is called.

    python examples/smollm/products.py [--out DIR] [--seed N]

Each prompt begins with the same two products, as conversations that have ended. Without them the model never
calls the tool. 40 products are held out.

Then: `turnwise train examples/smollm/tool.yaml`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.cli.main import exit_status
from turnwise.runtime.replaceable import write_new_or_same

NUM_TRAIN, NUM_HELD_OUT = 500, 40
SHOWN = ((12, 34), (71, 65))
Row = dict[str, Any]


def rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and rows that are held out."""
    terms = range(11, 100)
    pairs = [(a, b) for a in terms for b in terms if (a, b) not in SHOWN]
    chosen = random.Random(seed).sample(pairs, NUM_TRAIN + NUM_HELD_OUT)
    made = [row(*pair) for pair in chosen]
    return made[NUM_HELD_OUT:], made[:NUM_HELD_OUT]


def row(a: int, b: int) -> Row:
    shown = [message for number, pair in enumerate(SHOWN) for message in conversation(number, *pair)]
    return {"prompt": [*shown, question(a, b)], "agent_name": "tool_agent", "answer": str(a * b)}


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def conversation(number: int, a: int, b: int) -> list[dict[str, Any]]:
    """A question, a call, its result and the answer."""
    function = {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}
    call = {"id": f"t{number}", "type": "function", "function": function}
    result = {"role": "tool", "name": "calculator", "tool_call_id": call["id"], "content": str(a * b)}
    return [
        question(a, b),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        result,
        {"role": "assistant", "content": str(a * b)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm"))
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    train, held_out = rows(options.seed)
    write(options.out / "tool_train.jsonl", train)
    write(options.out / "tool_val.jsonl", held_out)
    print(f"{options.out}: {len(train)} products to train on, {len(held_out)} held out")


def write(path: Path, content: Sequence[Row]) -> None:
    write_new_or_same(path, "".join(json.dumps(row) + "\n" for row in content), "--out")


if __name__ == "__main__":
    sys.exit(exit_status(main))
