"""Megatron with TransformerEngine's packed attention trains what plain torch trains. Nothing of this can run
on a CPU."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import measured, run_small, small_config, training

LIBRARIES = ("megatron", "transformer_engine")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or any(find_spec(library) is None for library in LIBRARIES),
    reason="this needs a GPU, megatron-core and transformer-engine[pytorch]",
)


def first_step(model: Path, folder: Path, devices: list[int], strategy: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a run's first step in bf16, which has eight samples. The run's own gate compares
    log-probs with the sampler's."""
    num_copies = len(devices) // math.prod(strategy.get("strategy_config", {}).values())
    trained = {
        **training(1e-3, 4, gradient_accumulation_steps=2 // num_copies),
        "device_mapping": devices,
        "strategy_args": strategy,
        "model_args": {"dtype": "bf16"},
    }
    config = small_config(model, folder, max_steps=2, actor_train=trained, num_gpus_per_node=len(devices))
    return measured(run_small(config).folder)[0]


@pytest.mark.parametrize(
    ("num_devices", "sizes"),
    [(1, {}), (2, {}), (2, {"tensor_model_parallel_size": 2}), (2, {"context_parallel_size": 2})],
    ids=["one", "dp2", "tp2", "cp2"],
)
def test_cards_train_what_one_trains(tiny_model, tmp_path, num_devices, sizes):
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, and this needs {num_devices}")
    devices = list(range(num_devices))
    plain = first_step(tiny_model, tmp_path / "torch", [0], {"strategy_name": "torch_train"})
    strategy = {"strategy_name": "megatron_train", "strategy_config": sizes}
    divided = first_step(tiny_model, tmp_path / "megatron", devices, strategy)
    for name in ("actor/loss", "actor_train/grad_norm"):
        assert divided[name] == pytest.approx(plain[name], rel=0.05, abs=1e-3)
