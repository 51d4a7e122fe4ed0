"""Sizes of a training by name, and what a training costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.config.model_shape import read_model_shape
from turnwise.errors import ConfigError, nearest
from turnwise.rl_tool.parameters import Train

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"max_samples": 10, "num_epochs": 1, "batch_size": 2},
    "small": {"max_samples": 100, "num_epochs": 3, "batch_size": 4},
    "medium": {"max_samples": 1000, "num_epochs": 3, "batch_size": 8},
    "full": {"num_epochs": 5, "batch_size": 8},
}
SAFE_REWARD = {"only_if_correct": True, "floor": 0.0, "max_steps": 5}
"""What the presets add to a reward that has such parameters: a wrong answer can't earn anything by its form."""


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `train`, with those of the preset that aren't given."""
    name = given.get("preset")
    if name is None:
        return dict(given)
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} isn't one of {', '.join(PRESETS)}.{nearest(str(name), PRESETS)}")
    values = {**PRESETS[name], **given}
    names = {"length_penalty": ("only_if_correct", "floor"), "step": tuple(SAFE_REWARD), "combined": tuple(SAFE_REWARD)}
    reward = values.get("reward_type")
    if isinstance(reward, str) and reward in names:
        safe = {key: SAFE_REWARD[key] for key in names[reward]}
        values["reward_config"] = {**safe, **values.get("reward_config", {})}
    return values


def estimate_seconds(asked: Train, texts: Sequence[str], num_answers: int) -> float:
    """About how long a training takes on this machine: 6 operations a parameter and token to train, 2 for each further pass
    (sampling, old log-probs, reference), at a quarter of the speed of a matrix product. A token is four characters."""
    import torch

    shape = read_model_shape(asked.model_name)
    if shape is None:
        return 0.0
    is_sft, size = asked.algorithm == "sft", 512
    tokens = asked.num_epochs * sum(
        len(text) // 4 + (0 if is_sft else asked.max_new_tokens or 256) * num_answers for text in texts
    )
    matrix = torch.ones(size, size, device="cuda" if torch.cuda.is_available() else "cpu")
    started, products = time.perf_counter(), 4
    for _ in range(products):
        float((matrix @ matrix)[0, 0])
    speed = products * 2 * size**3 / (time.perf_counter() - started) / 4
    return (6 if is_sft else 12) * shape.num_parameters * tokens / speed
