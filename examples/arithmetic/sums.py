"""Sums of two numbers below 100 as rows, a reward for them, and a tiny model that is right about one time in
three.

    python examples/arithmetic/sums.py [--out DIR] [--seed N]

1. The 10,000 sums are dealt out: 1,000 are held out, and nothing is ever trained on them, nor on b + a where
a + b is.
2. A model with random weights and a tokenizer are made.
3. Supervised fine-tuning teaches it addition. Once it begins to understand, two hundred steps take it from
nothing to nearly
   all, and each seed begins at another step. So checkpoints are measured: the training starts from the first
   one that is right in 32 of 100 answers to sums that weren't shown.

Then: `turnwise train examples/arithmetic/grpo.yaml`, or the same in Python: `python
examples/arithmetic/train.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from bisect import bisect_left
from pathlib import Path

from turnwise import Trainer
from turnwise.assemble.sft import fine_tune
from turnwise.cli.main import exit_status
from turnwise.config import SFTConfig, load_config
from turnwise.examine.examined import examine
from turnwise.models.make import make_model
from turnwise.runtime.replaceable import point_link, require_new_or_link, write_new_or_same

HERE = Path(__file__).parent
NUM_HELD_OUT = 1000
NUM_NOT_SHOWN = 1000
SUCCESS_TO_START_FROM = 0.32
"""Share of sampled answers."""


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the right sum, else 0."""
    return [float(text.split() == right.split()) for text, right in zip(completions, answer, strict=True)]


def digits(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """The share of digits that are right, counted from the last."""
    pairs = [
        (text.split()[::-1], right.split()[::-1]) for text, right in zip(completions, answer, strict=True)
    ]
    return [sum(a == b for a, b in zip(*pair, strict=False)) / max(map(len, pair)) for pair in pairs]


def sums(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to train on and rows that are held out, in an order of the seed's own. Digits are apart, so that
    each is a token."""
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    random.Random(seed).shuffle(pairs)
    ordered = [pair for a, b in pairs for pair in dict.fromkeys([(a, b), (b, a)])]
    rows = [{"prompt": f"{_apart(a)} + {_apart(b)} =", "answer": _apart(a + b)} for a, b in ordered]
    # The last pair that is held out may be cut in two: its b + a goes.
    is_cut = ordered[NUM_HELD_OUT] == ordered[NUM_HELD_OUT - 1][::-1]
    return rows[NUM_HELD_OUT + is_cut :], rows[:NUM_HELD_OUT]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of sft.yaml")
    options = parser.parse_args()
    out = options.out
    start = out / "sft_model"
    require_new_or_link(start, "--out")
    train, held_out = sums(options.seed)
    write(out / "val.jsonl", held_out)
    write(out / "train.jsonl", train)
    shown = [{"messages": conversation(row)} for row in train]
    write(out / "demonstrations.jsonl", shown[NUM_NOT_SHOWN:])
    write(out / "not_shown.jsonl", train[:NUM_NOT_SHOWN])
    made = make_model(
        "tiny", out / "model", [f"{row['prompt']} {row['answer']}" for row in train[:3000]], seed=options.seed
    )
    paths = [f"pretrain={made.folder}", f"output_dir={out}", f"train_files=[{out / 'demonstrations.jsonl'}]"]
    config, _ = load_config(
        HERE / "sft.yaml", [*paths, f"seed={options.seed}", *options.overrides], SFTConfig
    )
    point_link(start, first_good_enough(fine_tune(examine(config)), out), "--out")
    print(f"\nnext: turnwise train examples/arithmetic/grpo.yaml  (starts from {start})")


def first_good_enough(last: Path, out: Path) -> Path:
    """The first checkpoint of the last one's run that is good enough to start from, by bisection. All others
    are deleted."""
    data = {
        "train_files": str(out / "val.jsonl"),
        "val_files": str(out / "not_shown.jsonl"),
    }  # nothing is trained here
    settings = {"data": data, "output_dir": str(out), "val_batch_size": NUM_NOT_SHOWN}
    judge = Trainer.from_config(HERE / "grpo.yaml", pretrain=str(last), is_quiet=True, **settings)

    def success(checkpoint: Path) -> float:
        share = judge.evaluate(checkpoint).overall.success
        print(f"{checkpoint.name}: right in {share:.1%} of sums that weren't shown", flush=True)
        return share

    checkpoints = sorted(
        last.parent.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2])
    )
    index = bisect_left(checkpoints, SUCCESS_TO_START_FROM, key=success)
    chosen = checkpoints[min(index, len(checkpoints) - 1)]
    for other in set(checkpoints) - {chosen}:
        shutil.rmtree(other)
    return chosen


def conversation(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]


def write(path: Path, rows: list[dict[str, object]]) -> None:
    write_new_or_same(path, "".join(json.dumps(row) + "\n" for row in rows), "--out")


def _apart(number: int) -> str:
    return " ".join(str(number))


if __name__ == "__main__":
    sys.exit(exit_status(main))
