"""The answers of a config where a setting can't do anything: a refusal, or a sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from settings.leaves import TAG, Kind, Leaf, value_at, with_value
from turnwise.config import AgenticConfig, SFTConfig, parse_config, unavailable
from turnwise.config.problems import Problem
from turnwise.errors import ConfigError

_TOY = {
    "env_type": "odd_envs:CrowdEnv",
    "max_steps": 3,
    "max_tokens_per_step": 4,
    "agent_system_template": "",
    "agent_template": "{observation}",
    "action_pattern": None,
}
BASE: dict[Kind, dict[str, Any]] = {
    AgenticConfig: {
        "pretrain": "$model",
        "max_steps": 1,
        "eval_steps": 0,
        "save_steps": 0,
        "rollout_batch_size": 4,
        "val_batch_size": 2,
        "sequence_length": 128,
        "track_with": [],
        "actor_train": {"training_args": {"learning_rate": 0.01, "per_device_train_batch_size": 2}},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": [TAG]},
        "val_env_manager": {"num_env_groups": 2},
        "custom_envs": {TAG: _TOY, "Other": _TOY | {"agent_template": "? {observation}"}},
    },
    SFTConfig: {
        "pretrain": "$model",
        "train_files": "$demonstrations",
        "eval_steps": 0,
        "save_steps": 0,
        "sequence_length": 128,
        "track_with": [],
        "training_args": {"learning_rate": 0.01, "per_device_train_batch_size": 2},
    },
}
"""Very short runs: two optimiser steps of one batch, or an epoch of fine-tuning."""

COMBINATIONS: dict[Kind, tuple[dict[str, Any], ...]] = {
    AgenticConfig: (
        {},
        {"use_kl_loss": True, "add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.1},
        {"adv_estimator": "gae", "deterministic": True},
    ),
    SFTConfig: ({}, {"val_files": "$demonstrations"}),
}
"""Changes of the base under which different roles and parts are there."""

_OTHER_VALUES: dict[str, Any] = {
    "group_filter": "non_zero_variance",
    "default_agent": "react_agent",
    "data.reward.name": "exact_match",
    "device_mapping": [2],
    "cluster.address": "auto",
    "checkpoint_config.type": "elsewhere",
    "num_return_sequences": 2,
    "detach": False,
    "strategy_name": "megatron_train",
    "reference.strategy_args.strategy_name": "megatron_infer",
    "reward.strategy_args.strategy_name": "megatron_infer",
}
"""Other values of keys for which no value does that any key may have; of a key with one value, one that it
hasn't."""


class Answer(NamedTuple):
    """`refusal` of the command line or of the run, or `warning`; the sentence; and the key that it names, or
    a section."""

    kind: str
    sentence: str
    key: str = ""


def answers(kind: Kind, changes: dict[str, Any], leaf: Leaf) -> list[Answer]:
    """The answers to setting the key to another value, in the base with these changes.

    An answer is a line that begins with the key's name, or with that of a section around it.
    """
    base = BASE[kind] | changes
    current = value_at(_config(kind, json.dumps(base)), leaf.path)
    names = (leaf.key, str(leaf.path[-1]))
    value = next((_OTHER_VALUES[name] for name in names if name in _OTHER_VALUES), None)
    value = leaf.other_value(current) if value is None else value
    if value is None:
        raise LookupError(f"there is no other value of {leaf.key} to try; give it one here")
    return list(_about(leaf, _lines(kind, with_value(base, leaf.path, value))))


@cache
def _config(kind: Kind, values: str) -> BaseModel:
    """The config of values in JSON, which is asked for anew with each of its keys."""
    return parse_config(json.loads(values), kind)[0]


def _lines(kind: Kind, values: dict[str, Any]) -> Iterator[Answer]:
    try:
        config, notes = parse_config(values, kind)
    except ConfigError as error:
        yield from (Answer("refusal", line.strip()) for line in str(error).splitlines())
        return
    yield from (Answer("warning", note) for note in notes)
    yield from (Answer("refusal", line) for line in unavailable(config))


def _about(leaf: Leaf, lines: Iterator[Answer]) -> Iterator[Answer]:
    names = [Problem(leaf.path[:length], "").key for length in range(len(leaf.path), 0, -1)]
    for kind, line, _ in lines:
        for name in names:
            if line.startswith((f"{name}:", f"{name} ")):
                sentence = line.removeprefix(name).removeprefix(":").strip()
                yield Answer(kind, sentence.removeprefix("has no effect: ").rstrip("."), name)
                break
