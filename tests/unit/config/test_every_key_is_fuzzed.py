"""Every key of the schema with values that can't be meant: each is taken, or refused by a ConfigError that
names its key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date
from itertools import cycle, islice
from typing import Any

import pytest
from pydantic import BaseModel
from settings.leaves import models_in, with_value
from small_configs import MINIMAL, SFT

from turnwise.config import AgenticConfig, SFTConfig, describe, parse_config, unavailable
from turnwise.errors import ConfigError

LIST: list[Any] = []
LIST += [LIST, LIST]
DICT: dict[str, Any] = {}
DICT["a"] = DICT
HUGE = "x" * 10**6
HOSTILE: list[Any] = [
    *(
        "a\0b",
        "\ud800",
        "",
        "  ",
        ":",
        "a:b",
        "word",
        "../x",
        "${a}",
        "{x!z:",
        "(",
        "1e400",
        HUGE,
        "x" * 300,
        "/" * 5000,
    ),
    *(
        -1,
        -1.5,
        0,
        1,
        2**63,
        10**400,
        1e300,
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        None,
        date(2001, 1, 1),
    ),
    *([], {}, LIST, DICT, [None], [[{}]], ["", "a"], [-1], [LIST], {1: 2}, {None: 1}, {"a": HUGE}),
]
VALUES_OF_A_KEY = 6
"""Number of hostile values that a key gets in turn; the next key of the same type gets the next ones."""
BASES: dict[type[AgenticConfig] | type[SFTConfig], dict[str, Any]] = {AgenticConfig: MINIMAL, SFTConfig: SFT}


def keys_of(
    section: type[BaseModel], seen: set[type[BaseModel]], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Every key of every section, at one place where it stands."""
    seen.add(section)
    for name, field in section.model_fields.items():
        path = (*prefix, name, "Lake") if name == "custom_envs" else (*prefix, name)
        yield path
        for inner in models_in(field.annotation):
            if inner not in seen and name != "filters":
                yield from keys_of(inner, seen, path)


def require_named(kind: Any, path: tuple[str, ...], value: Any) -> None:
    try:
        config, _ = parse_config(with_value(BASES[kind], path, value), kind)
        describe(config)
        unavailable(config)
    except ConfigError as error:
        assert path[-1] in str(error) and len(str(error)) < 20_000


@pytest.mark.parametrize("kind", BASES)
def test_whatever_a_key_holds_is_taken_or_named(kind: Any) -> None:
    values = cycle(HOSTILE)
    keys = list(keys_of(kind, set()))
    assert len(keys) > 40
    for path in keys:
        for value in islice(values, VALUES_OF_A_KEY):
            require_named(kind, path, value)


@pytest.mark.parametrize(
    "key",
    [
        "pretrain",
        "actor_infer.generating_args.max_new_tokens",
        "actor_train.model_args.lora_rank",
        "custom_envs.Lake.env_type",
        "train_env_manager.tags",
    ],
)
def test_keys_that_fell_over_once_get_every_value(key: str) -> None:
    for value in HOSTILE:
        require_named(AgenticConfig, tuple(key.split(".")), value)
