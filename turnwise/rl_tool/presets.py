"""Sizes of a training by name, and what a training costs on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError, nearest

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"max_samples": 10, "num_epochs": 1, "batch_size": 2},
    "small": {"max_samples": 100, "num_epochs": 3, "batch_size": 4},
    "medium": {"max_samples": 1000, "num_epochs": 3, "batch_size": 8},
    "full": {"num_epochs": 5, "batch_size": 8},
}
SAFE_REWARD = {"only_if_correct": True, "floor": 0.0, "max_steps": 5}
"""What the presets add to a reward that has such parameters: a wrong answer can't earn anything by its form."""


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `train`, with those of the preset that aren't given.

    Raises:
        ConfigError: there is no such preset.
    """
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
