"""Configs with as few keys as there can be, and others beside them under dotted names, as on the command
line."""

from __future__ import annotations

from typing import Any

from settings.leaves import with_value

from turnwise.config import AgenticConfig, parse_config

LAKE: dict[str, Any] = {"env_type": "frozen_lake"}
MINIMAL: dict[str, Any] = {"pretrain": "models/none", "custom_envs": {"Lake": LAKE}}
SFT: dict[str, Any] = {"pretrain": "models/none", "train_files": "demos.jsonl"}


def values_of(base: dict[str, Any] = MINIMAL, /, **keys: Any) -> dict[str, Any]:
    """The base with these keys; `custom_envs.Lake.mode` is one in a section."""
    for key, value in keys.items():
        base = with_value(base, tuple(key.split(".")), value)
    return base


def config_of(**keys: Any) -> AgenticConfig:
    return parse_config(values_of(**keys))[0]


def notes_of(**keys: Any) -> list[str]:
    return parse_config(values_of(**keys))[1]
