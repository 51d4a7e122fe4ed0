"""Sums of one digit as rows, and a reward for them.

    python examples/smollm/one_digit.py [--out DIR] [--seed N] [--largest 9]

Of the 100 sums, 20 are held out: ten pairs of different digits, in both orders. So a sum that is held out is
never trained on, nor is the same sum the other way round. `--largest 99` makes sums of two digits too.

Then: `turnwise train examples/smollm/grpo.yaml`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

from turnwise.cli.main import exit_status
from turnwise.runtime.replaceable import write_new_or_same

NUM_HELD_OUT_PAIRS = 10
Row = dict[str, str]


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 where the last whole number of a completion is the right one, else 0."""
    return [float(last_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def last_number(text: str) -> str | None:
    """The last whole number of a text as its digits; None if there is none. The 7 of `7.5` is none."""
    numbers = re.findall(r"(?<![\d.])-?\d+(?!\.?\d)", text)
    if not numbers:
        return None
    return numbers[-1]


def rows(seed: int, largest: int = 9) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and rows that are held out, with terms from 0 to `largest`. The seed decides which
    are held out."""
    terms = range(largest + 1)
    pairs = [(a, b) for a in terms for b in range(a + 1, largest + 1)]
    random.Random(seed).shuffle(pairs)
    held_out = both_orders(pairs[:NUM_HELD_OUT_PAIRS])
    doubles = [(a, a) for a in terms]
    train = both_orders(pairs[NUM_HELD_OUT_PAIRS:]) + doubles
    return [row(*pair) for pair in train], [row(*pair) for pair in held_out]


def both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [ordered for a, b in pairs for ordered in ((a, b), (b, a))]


def row(a: int, b: int) -> Row:
    return {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--largest", type=int, default=9, help="the largest term")
    options = parser.parse_args()
    train, held_out = rows(options.seed, options.largest)
    write(options.out / "train.jsonl", train)
    write(options.out / "val.jsonl", held_out)
    print(f"{options.out}: {len(train)} sums to train on, {len(held_out)} held out")


def write(path: Path, content: list[Row]) -> None:
    write_new_or_same(path, "".join(json.dumps(row) + "\n" for row in content), "--out")


if __name__ == "__main__":
    sys.exit(exit_status(main))
