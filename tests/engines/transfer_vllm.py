"""vLLM's own transfer of weights, over gloo: the trainer, a process of its own, sends into vLLM's worker.
Sampler and trainer agree then."""

from __future__ import annotations

import sys

from train_vllm import agreement

from turnwise.cli.main import exit_status

KEYS = {
    "cluster.name": "process",
    "entropy_loss_coef": 0.1,  # random weights rarely reach the goal: this moves them
    "actor_train.training_args.warmup_steps": 0,
    "actor_infer.strategy_args.strategy_config.weight_transfer_config.backend": "gloo",
}


def main() -> None:
    mean, worst = agreement(KEYS)
    print(f"vllm: weights sent into its worker, {mean:.1e} nats apart on average and {worst:.1e} at most")


if __name__ == "__main__":
    sys.exit(exit_status(main))
