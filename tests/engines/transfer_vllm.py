"""vLLM's own transfer of weights: the trainer, a process of its own, sends into vLLM's worker, over gloo or
by a copy that the worker reads (as `ipc` does on a GPU). Sampler and trainer agree then."""

from __future__ import annotations

import sys

from train_vllm import agreement

from turnwise.cli.main import exit_status

KEYS = {
    "cluster.name": "process",
    "entropy_loss_coef": 0.1,  # random weights rarely reach the goal: this moves them
    "actor_train.training_args.warmup_steps": 0,
}
OPTIONS = "actor_infer.strategy_args.strategy_config"
CASES: dict[str, dict[str, object]] = {
    "gloo": {},
    # Two ranks, each with a copy for the worker on its device.
    "ipc": {
        "actor_train.strategy_args.strategy_name": "fsdp2_train",
        "actor_train.device_mapping": "[0,1]",
        "actor_infer.device_mapping": "[0,1]",
        "num_gpus_per_node": 2,
        f"{OPTIONS}.tensor_parallel_size": 2,
    },
}


def main() -> None:
    for backend, devices in CASES.items():
        keys = {**KEYS, f"{OPTIONS}.weight_transfer_config.backend": backend, **devices}
        mean, worst = agreement(keys)
        print(f"vllm: weights by {backend}, {mean:.1e} nats apart on average and {worst:.1e} at most")


if __name__ == "__main__":
    sys.exit(exit_status(main))
