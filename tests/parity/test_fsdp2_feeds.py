"""A policy whose weights are shared out among two ranks feeds two embedded replicas: sampler and trainer
agree after each update. `tests/engines/train_vllm_sharded.py` feeds vLLM with the model on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import measured, run_small, small_config, training

pytestmark = pytest.mark.extra

NUM_UPDATES = 4


def test_replicas_sample_from_what_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    """Each step is sampled with the weights of the update before it."""
    devices = {"device_mapping": [0, 1]}
    config = small_config(
        tiny_model,
        tmp_path / "runs",
        max_steps=NUM_UPDATES + 1,
        save_steps=0,
        num_gpus_per_node=2,
        entropy_loss_coef=0.05,
        actor_train={**training(5e-3, 4), **devices, "strategy_args": {"strategy_name": "fsdp2_train"}},
        actor_infer=devices,
    )
    steps = measured(run_small(config).folder)
    assert len(steps) == NUM_UPDATES + 1
    assert all(step["actor_train/grad_norm"] > 0 for step in steps)
    assert max(step["parity/logprob_diff_max"] for step in steps) <= 1e-5
