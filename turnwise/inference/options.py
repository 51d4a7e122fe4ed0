"""What a config may tell a server (`strategy_config`), checked before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.errors import ConfigError, nearest

BUILDER_OPTIONS = frozenset({"model", "max_length", "decode", "version", "stopwatch", "schedule"})
"""Parameters of servers that follow from other settings."""


def check_server_options(server_class: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Checks names of `options` against the constructor's, and that its whole numbers are whole numbers above 0.

    Raises:
        ConfigError: an unknown option, one that the builder sets itself, or a value that can't be.
    """
    parameters = inspect.signature(server_class).parameters
    allowed = [name for name in parameters if name not in BUILDER_OPTIONS]
    for name, value in options.items():
        where = f"strategy_config of {server_class.__name__}: {name}"
        if name in BUILDER_OPTIONS and name in parameters:
            raise ConfigError(f"{where} follows from other settings (max_length from sequence_length); remove it")
        if name not in allowed:
            raise ConfigError(f"{where} isn't an option; it has {', '.join(allowed) or 'none'}.{nearest(name, allowed)}")
        is_count = parameters[name].annotation in (int, "int")
        if is_count and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where} is {value!r}; it must be a whole number of at least 1, without quotes or exponent")
