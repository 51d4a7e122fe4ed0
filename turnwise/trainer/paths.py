"""Paths that a Trainer is given, and the folders that its config needs."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.config import AgenticConfig
from turnwise.errors import ConfigError, ModelError
from turnwise.model_files.folder import base_of_adapter, folder_here


def as_path(value: Any, argument: str) -> Path:
    """The path that an argument names. Raises ConfigError for anything but a string or a path, and for an
    empty one."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(
            f"{argument}: got {str(value)[:60]!r}, of type {type(value).__name__}; give a path as a string"
        )
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{argument}: {text!r} isn't a path; give the path of a file or folder as a string")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{argument}: {text!r} begins with ~ and the name of no user here; write the path out"
        ) from error


def folders_named(config: AgenticConfig) -> list[Path]:
    """The folders that values of a config name, such as `pretrain`, and those of the bases of the adapters
    among them."""
    folders: list[Path] = []
    for text in _strings(config.model_dump()):
        folder = _folder(text)
        if folder is not None:
            folders.append(folder)
            with suppress(ModelError):  # a folder that isn't a whole adapter has no base
                folders += bases_of(folder)
    return folders


def bases_of(model: Path) -> list[Path]:
    """The folders of the models that an adapter is put onto; empty if `model` isn't an adapter's folder."""
    folders: list[Path] = []
    base = base_of_adapter(model)
    while base is not None:
        folder = folder_here(base)
        if folder is None:
            break
        folders.append(folder)
        base = base_of_adapter(folder)
    return folders


def _folder(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        if text and path.is_dir():
            return path
    except (OSError, ValueError, RuntimeError):  # too long for a path, a null byte, no such user
        pass
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
