from __future__ import annotations

import pytest
import torch
from toy_model import toy_model

from turnwise.errors import ConfigError
from turnwise.training.optimizer import LRSchedule, OptimizerSettings, build_optimizer, clip_gradients


def rates(settings: OptimizerSettings, num_steps: int) -> list[float]:
    return [LRSchedule(settings).rate(position) for position in range(num_steps)]


def test_schedules() -> None:
    assert rates(OptimizerSettings(1.0), 3) == [1.0] * 3
    assert rates(OptimizerSettings(1.0, warmup_steps=2), 4) == [0.0, 0.5, 1.0, 1.0]
    assert rates(OptimizerSettings(1.0, scheduler="linear", total_steps=4), 4) == [1.0, 0.75, 0.5, 0.25]
    warm = OptimizerSettings(1.0, scheduler="cosine", warmup_ratio=0.25, total_steps=8)
    assert rates(warm, 9) == pytest.approx([0, 0.5, 1, 0.933, 0.75, 0.5, 0.25, 0.067, 0], abs=1e-3)


def test_every_schedule_is_one_of_positions_that_need_not_be_whole() -> None:
    for name in (
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
    ):
        schedule = LRSchedule(OptimizerSettings(1.0, scheduler=name, warmup_steps=2, total_steps=8))
        around = [schedule.rate(position) for position in (0, 0.5, 1, 3, 3.5, 4)]
        assert around[0] == 0.0 and around[1] == 0.25 and around[2] == 0.5
        assert around[3] >= around[4] >= around[5] and (around[3] > around[4]) == (
            not name.startswith("constant")
        )


def test_bad_settings_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler_type 'cosin'.*Did you mean 'cosine'"):
        OptimizerSettings(1.0, scheduler="cosin")
    with pytest.raises(ConfigError, match="set max_steps"):
        OptimizerSettings(1.0, scheduler="linear")
    with pytest.raises(ConfigError, match="warmup_ratio"):
        OptimizerSettings(1.0, warmup_ratio=0.1)


def test_norms_and_biases_do_not_decay_and_frozen_parameters_are_left_out() -> None:
    model = toy_model(model_type="qwen2")
    model.model.layers[0].requires_grad_(False)
    matrices, vectors = build_optimizer(model, OptimizerSettings(1.0, weight_decay=0.1)).param_groups
    assert matrices["weight_decay"] == 0.1 and all(p.ndim == 2 for p in matrices["params"])
    assert vectors["weight_decay"] == 0.0 and all(p.ndim == 1 for p in vectors["params"])
    num_trained = sum(p.numel() for group in (matrices, vectors) for p in group["params"])
    assert num_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_adamw_is_the_textbook_update() -> None:
    weight = torch.nn.Linear(2, 2, bias=False)
    before = weight.weight.detach().clone()
    weight.weight.grad = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    build_optimizer(weight, OptimizerSettings(0.1, weight_decay=0.5)).step()
    torch.testing.assert_close(weight.weight.detach(), before * (1 - 0.05) - 0.1 * weight.weight.grad.sign())


def test_clipping_returns_the_norm_before() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    for max_norm, expected in ((None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        weight.grad = torch.tensor([3.0, 4.0])
        assert clip_gradients([weight], max_norm).item() == 5.0
        torch.testing.assert_close(weight.grad, torch.tensor(expected))
