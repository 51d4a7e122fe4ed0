"""Sums in words, from random weights: the six stages, with an imitation that ends before it has taught
everything.

    python examples/rl_tool/word_problems.py [--out DIR] [--seed N]

1. Problems have one or two additions of numbers below 40. One pair of operands in five is in test problems
only, and another
   tenth of them is kept from imitation, to look at it by.
2. Imitation takes 500 new problems at a time, and ends once 40% of the problems with kept operands are right:
it
   learns to add within a few rounds, and each seed begins at another one.
3. Reinforcement does the rest. Its reward is 1 for a right answer, and half of the share of right digits in
the results
   of the steps. `training_results.json` and `report.html` in DIR have the figures of the test problems.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from turnwise import AgenticRLPipeline
from turnwise.cli.main import exit_status
from turnwise.data.gsm8k import generate_problems, prompt_of
from turnwise.models.make import make_model
from turnwise.runtime.replaceable import write_new_or_same
from turnwise.types import derive_seed

SIZES = {"steps": (1, 2), "largest": 39, "operations": "+"}
GOOD_ENOUGH = 0.4
"""The accuracy that ends imitation."""
Row = dict[str, str]


def right_digits(completions: list[str], full_answer: list[str], **columns: object) -> list[float]:
    """The share of right digits in the results of the steps, counted from the last digit of each."""
    return [
        share_of_digits(results(text), results(truth))
        for text, truth in zip(completions, full_answer, strict=True)
    ]


def results(answer: str) -> list[str]:
    return re.findall(r"=(\d+)>>", answer)


def share_of_digits(stated: list[str], true: list[str]) -> float:
    pairs = [(a[::-1], b[::-1]) for a, b in zip_longest(stated, true, fillvalue="")]
    return sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False)) / sum(
        max(len(a), len(b)) for a, b in pairs
    )


class WordProblems(AgenticRLPipeline):
    """The pipeline, with an imitation in rounds."""

    rounds: list[list[Row]]
    looked_at: list[Row]

    def stage2_sft_training(self) -> str:
        """Imitation, round by round; returns the folder of the last one's model."""
        if "sft_training" in self.results:
            return str(self.results["sft_training"]["output_dir"])
        model = self.config["model"]["base_model"]
        for number, rows in enumerate(self.rounds, start=1):
            out = self.output_dir / "sft" / f"round_{number}"
            asked = {
                "action": "train",
                "model_name": model,
                "output_dir": str(out),
                "dataset": rows,
                **self.config["sft"],
            }
            result = answer(self, asked)
            model = result["output_dir"]
            looked = {
                "action": "evaluate",
                "model_path": model,
                "dataset": self.looked_at,
                "max_samples": len(self.looked_at),
            }
            accuracy = answer(self, {**looked, "max_new_tokens": self.config["eval"]["max_new_tokens"]})[
                "accuracy"
            ]
            print(f"imitation, round {number}: {accuracy:.3f} of the problems are right", flush=True)
            if accuracy >= GOOD_ENOUGH:
                break
        self.results["sft_training"] = {**result, "num_rounds": number, "parameters": {"algorithm": "sft"}}
        return str(model)


def answer(pipeline: AgenticRLPipeline, asked: dict[str, Any]) -> dict[str, Any]:
    result = pipeline.rl_tool.run_dict(
        {"use_tensorboard": False, **asked} if asked["action"] == "train" else asked
    )
    if result["status"] == "error":
        sys.exit(result["message"])
    return result


def deal(
    seed: int, num_rounds: int, round_size: int, num_prompts: int
) -> tuple[list[list[Row]], list[Row], list[Row]]:
    """The rounds of imitation, the problems that it is looked at by, and those of reinforcement."""
    number = round(1.5 * num_rounds * round_size) + num_prompts + 3000
    rows = generate_problems(number, seed=seed, **SIZES)
    shown, looked_at = [], []
    for row in rows[num_prompts:]:
        kept = [
            derive_seed("kept", *sorted(map(int, pair))) % 10 == 0
            for pair in re.findall(r"<<(\d+)\+(\d+)=", row["answer"])
        ]
        if not any(kept):
            shown.append(row)
        elif kept[0]:
            looked_at.append(row)
    rounds = [shown[start : start + round_size] for start in range(0, num_rounds * round_size, round_size)]
    return rounds, looked_at, rows[:num_prompts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/word_problems"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60, help="of imitation at most")
    parser.add_argument("--round-size", type=int, default=500, help="problems of a round")
    parser.add_argument("--tests", type=int, default=400, help="problems of an evaluation")
    parser.add_argument(
        "--prompts", type=int, default=16_000, help="problems of reinforcement, 64 of them a step"
    )
    options = parser.parse_args()
    out, started = options.out, time.perf_counter()
    rounds, looked_at, prompts = deal(options.seed, options.rounds, options.round_size, options.prompts)
    problems = {
        "train": prompts,
        "test": generate_problems(options.tests, "test", seed=options.seed, **SIZES),
    }
    for split, rows in problems.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_new_or_same(out / "problems" / f"{split}.jsonl", text, "--out")
    if not (out / "model").exists():
        texts = [f"{prompt_of(row['question'])} {row['answer']} Final Answer:" for row in prompts[:2000]]
        make_model("tiny", out / "model", texts, seed=options.seed)
    whole = {"use_lora": False, "batch_size": 32, "num_epochs": 1, "seed": options.seed}
    config = {
        "output_dir": str(out),
        "model": {"base_model": str(out / "model")},
        "data": {"dataset": str(out / "problems")},
        "sft": {**whole, "learning_rate": 2e-3, "warmup_ratio": 0.1},
        "grpo": {
            **whole,
            "batch_size": 64,
            "learning_rate": 4e-4,
            "lr_scheduler_type": "linear",
            "warmup_ratio": 0.05,
            "temperature": 1.0,
            "max_new_tokens": 56,
            "reward_type": {"accuracy": 1.0, "right_digits": 0.5},
            "kl_coef": 0.0,
        },
        "eval": {"max_samples": options.tests, "max_new_tokens": 56},
    }
    write_new_or_same(out / "pipeline.json", json.dumps(config, indent=2) + "\n", "--out")
    pipeline = WordProblems(out / "pipeline.json")
    pipeline.rl_tool.register_reward_function("right_digits", right_digits)
    pipeline.rounds, pipeline.looked_at = rounds, looked_at[: options.tests]
    result = pipeline.run()
    if result["status"] == "error":
        sys.exit(result["message"])
    before, after = (result[f"{kind}_evaluation"]["accuracy"] for kind in ("sft", "grpo"))
    print(
        f"seed {options.seed}: {before:.3f} after imitation, {after:.3f} after reinforcement; "
        f"{out}/report.html"
    )
    print(
        f"{time.perf_counter() - started:.0f} s, of which this process computed {time.process_time():.0f} s "
        "on its cores"
    )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
