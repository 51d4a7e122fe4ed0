"""`turnwise train` with vLLM: two steps of the FrozenLake example on random weights, and the parity of
sampler and trainer."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from turnwise.cli.main import exit_status, main as turnwise
from turnwise.models.make import make_model

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake" / "agentic.yaml"
TEXT = (
    "Walk to the goal G and avoid the holes O. You are at row 0, column 1. Up Down Left Right user "
    "assistant system"
)


def main() -> None:
    mean, worst = agreement({})
    print(f"vllm: 2 steps, sampler and trainer {mean:.1e} nats apart on average and {worst:.1e} at most")


def agreement(keys: dict[str, object]) -> tuple[float, float]:
    """The mean and the largest |Δ log-prob| between sampler and trainer, of two steps with these keys."""
    os.environ["TURNWISE_KERNELS"] = "off"  # plain torch computes the log-probs that vLLM's are compared with
    with tempfile.TemporaryDirectory() as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
        few: dict[str, object] = {
            "max_steps": 2,
            "eval_steps": 0,
            "rollout_batch_size": 32,
            "train_env_manager.num_env_groups": 4,
            "custom_envs.FrozenLake.max_steps": 3,
            "output_dir": f"{scratch}/runs",
            "pretrain": made.folder,
            "actor_infer.strategy_args.strategy_name": "vllm",
            "deadlines.request_s": 240,
            "deadlines.start_s": 900,
        }
        texts = [f"{key}={value}" for key, value in {**few, **keys}.items()]
        assert turnwise(["train", str(CONFIG), "--quiet", *texts]) == 0
        [metrics] = Path(scratch).glob("runs/*/*/metrics.jsonl")
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        mean, worst = (max(step[f"parity/logprob_diff_{kind}"] for step in steps) for kind in ("mean", "max"))
        assert len(steps) == 2 and mean <= 1e-5 and worst <= 1e-3, (len(steps), mean, worst)
        assert all(step["weights/copied_bytes"] > 0 for step in steps)
    return mean, worst


if __name__ == "__main__":
    sys.exit(exit_status(main))
