"""Reads a config and examines what it names, so that one error lists the faults of both with their lines in
the file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.config import AgenticConfig, SFTConfig, load_any_config, load_config, parse_config
from turnwise.config.problems import Problem
from turnwise.config.read.load import Purpose
from turnwise.examine.examined import Examined, ExaminedSFT, examine
from turnwise.examine.problems import object_problems

Find = Callable[[Examined | ExaminedSFT], Iterator[Problem]]
"""Yields the faults of what a config names: `object_problems`, or `problems`, which also tries the chat
template."""


class _Examining:
    """Examines the config that is read with `faults` as its `examine`, and keeps what was examined."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self.examined: Any = None

    def faults(self, config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
        """Yields the faults of what the config names."""
        self.examined = examine(config)
        yield from self._find(self.examined)


def load_examined(
    path: str | Path,
    overrides: Sequence[str] = (),
    strict: bool = False,
    purpose: Purpose = "train",
    find: Find = object_problems,
) -> tuple[Examined, list[str]]:
    """What the config of a reinforcement-learning run names, and the notes of `load_config`. Raises
    ConfigError that lists all faults."""
    examining = _Examining(find)
    _, notes = load_config(path, overrides, AgenticConfig, strict, purpose, examining.faults)
    return examining.examined, notes


def load_examined_sft(
    path: str | Path, overrides: Sequence[str] = (), strict: bool = False, find: Find = object_problems
) -> tuple[ExaminedSFT, list[str]]:
    """Like `load_examined`, for supervised fine-tuning."""
    examining = _Examining(find)
    _, notes = load_config(path, overrides, SFTConfig, strict, "train", examining.faults)
    return examining.examined, notes


def load_any_examined(
    path: str | Path, overrides: Sequence[str] = (), strict: bool = False, find: Find = object_problems
) -> tuple[Examined | ExaminedSFT, list[str]]:
    """Like `load_examined`, for either kind of config that is only to be shown."""
    examining = _Examining(find)
    _, notes = load_any_config(path, overrides, strict, examining.faults)
    return examining.examined, notes


def parse_examined(values: Mapping[str, Any], file: str | Path | None = None) -> tuple[Examined, list[str]]:
    """Like `load_examined`, for a plain mapping. With `file`, the values are merged into those of that
    file."""
    examining = _Examining(object_problems)
    _, notes = parse_config(values, AgenticConfig, file=file, examine=examining.faults)
    return examining.examined, notes


def parse_examined_sft(values: Mapping[str, Any]) -> tuple[ExaminedSFT, list[str]]:
    """Like `parse_examined`, for supervised fine-tuning."""
    examining = _Examining(object_problems)
    _, notes = parse_config(values, SFTConfig, examine=examining.faults)
    return examining.examined, notes
