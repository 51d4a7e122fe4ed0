"""GRPO on FrozenLake under Ray, with vLLM in actors: two replicas of one device each, then one replica split
over two. Sampler and trainer agree."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from train_ray import CONFIG, TEXT

from turnwise.cli.main import exit_status, main as turnwise
from turnwise.models.make import make_model

STEPS = 2
MAX_DIFFERENCE = 1e-5
KEYS = {
    "max_steps": STEPS,
    "eval_steps": 0,
    "save_steps": 0,
    "rollout_batch_size": 32,
    "train_env_manager.num_env_groups": 4,
    "custom_envs.FrozenLake.max_steps": 3,
    "entropy_loss_coef": 0.1,
    "actor_train.training_args.warmup_steps": 0,
    "actor_infer.strategy_args.strategy_name": "vllm",
    "deadlines.request_s": 240,
    "deadlines.start_s": 600,
    "cluster.name": "ray",
    "num_gpus_per_node": 2,
}
SPLIT = {"actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2}


def worst_difference(scratch: str, name: str, keys: dict[str, object]) -> float:
    """The largest |Δ log-prob| between sampler and trainer, of all steps of a run."""
    texts = [f"{key}={value}" for key, value in {**keys, "output_dir": f"{scratch}/{name}"}.items()]
    assert turnwise(["train", str(CONFIG), "--quiet", *texts]) == 0
    [metrics] = Path(scratch).glob(f"{name}/*/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(steps) == STEPS and all(step["weights/copies"] == 1 for step in steps)
    return max(step["parity/logprob_diff_max"] for step in steps)


def main() -> None:
    os.environ["TURNWISE_KERNELS"] = "off"  # plain torch computes the log-probs that vLLM's are compared with
    with tempfile.TemporaryDirectory() as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
        keys = {**KEYS, "pretrain": made.folder, "actor_infer.device_mapping": "[0,1]"}
        replicas = worst_difference(scratch, "replicas", keys)
        split = worst_difference(scratch, "split", {**keys, **SPLIT})
    assert max(replicas, split) <= MAX_DIFFERENCE, (replicas, split)
    print(f"vllm in actors of ray: two replicas {replicas:.1e} nats off at most, one of two {split:.1e}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
