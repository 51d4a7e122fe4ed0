"""What trust costs in a run: checkpoints, the parity gate and the log, as shares of its time; how far sampler
and trainer were apart over all of it; and what the run reached.

    turnwise train examples/frozen_lake/agentic.yaml pretrain=SFT_MODEL save_steps=10 eval_steps=80 python
    benchmarks/overheads.py RUN_FOLDER --name grpo turnwise train examples/frozen_lake/ppo.yaml
    pretrain=SFT_MODEL save_steps=10 eval_steps=80 val_batch_size=1000 python benchmarks/overheads.py
    RUN_FOLDER --name ppo CUT="actor_infer.generating_args.top_p=0.95 actor_infer.generating_args.top_k=100"
    turnwise train examples/frozen_lake/agentic.yaml pretrain=SFT_MODEL save_steps=10 eval_steps=80 $CUT
    python benchmarks/overheads.py RUN_FOLDER --name top_p
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from machine import describe_machine
from toy import parse_arguments

from turnwise.runtime.jsonl import read_jsonl
from turnwise.tracking.jsonl import read_metrics

SHARES = {
    "checkpoints": "time/step_checkpoint",
    "parity gate": "time/parity_s",
    "metrics and display": "time/step_log",
}
SUCCESS = re.compile(r"val/env/[^/]+/success")
PHASES = (
    "time/step_total",
    "time/step_model_update",
    "time/step_val",
    "time/step_checkpoint",
    "time/step_log",
)
"""What the time of a run is made of; the parity gate is part of the model update."""


def kept(run: Path) -> dict[str, float]:
    """How cut sampling was: ids that a token was drawn from, and the share of tokens that had one only."""
    turns = (turn for row in read_jsonl(run / "rollouts.jsonl") for turn in row[1]["turns"])
    counts = [len(ids) for turn in turns for ids in turn.get("kept_ids", ())]
    if not counts:
        return {}
    return {
        "num_tokens": len(counts),
        "ids_kept": sum(counts) / len(counts),
        "share_of_one": counts.count(1) / len(counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--name", required=True, help="of the result, results/NAME.json")
    options = parse_arguments(parser)
    out = Path(os.devnull) if options.toy else Path(__file__).parent / "results" / f"{options.name}.json"
    run = options.run
    rows = read_metrics(run / "metrics.jsonl")

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows)

    run_s = sum(total(name) for name in PHASES)
    shares = {title: total(name) / run_s for title, name in SHARES.items()}
    validations = [row for row in rows if "val/num_episodes" in row]
    success = [next(value for name, value in row.items() if SUCCESS.fullmatch(name)) for row in validations]
    steps = [row for row in rows if "actor/train_infer_diff_token_mean" in row]
    result = {
        "machine": describe_machine(),
        "num_steps": len(steps),
        "num_checkpoints": sum("time/step_checkpoint" in row for row in rows) + 1,
        "run_s": round(run_s, 1),
        "shares": {title: round(share, 5) for title, share in shares.items()},
        "success": {
            int(row["step"]): round(value, 4) for row, value in zip(validations, success, strict=True)
        },
        "episodes_a_validation": validations[-1]["val/num_episodes"],
        "logprob_diff_mean": sum(row["actor/train_infer_diff_token_mean"] for row in steps) / len(steps),
        "logprob_diff_largest_mean": max(row["actor/train_infer_diff_token_mean"] for row in steps),
        "logprob_diff_max": max(row["actor/train_infer_diff_token_max"] for row in steps),
        **kept(run),
    }
    for title, share in shares.items():
        print(f"{title:<20} {share:7.2%} of {run_s:.0f} s")
    print(f"success {result['success']}")
    print(
        f"|Δ log-prob| mean {result['logprob_diff_mean']:.2g}, max {result['logprob_diff_max']:.2g} over "
        f"{len(steps)} steps"
    )
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
