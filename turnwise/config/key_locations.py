"""The places of a composed config's keys: file and line, or the override that set them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from turnwise.config.problems import Path as KeyPath

MAX_LINKS = 16
"""Interpolations that are followed one after another: they might go in a circle."""
_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.-]*)\}")


def display(path: Path) -> str:
    """The path as a reader of the working directory would name it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


class KeyLocations:
    """Places of the keys of YAML files, where later ones come before earlier ones, and of overrides. Read only for messages."""

    def __init__(self, files: Sequence[Path], overrides: Sequence[str] = ()) -> None:
        self._file = display(files[-1])
        self._places: dict[KeyPath, str] = {}
        self._links: dict[KeyPath, KeyPath] = {}
        for file in files:
            with suppress(yaml.YAMLError, UnicodeDecodeError):
                self._walk(yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), (), display(file))
        for override in overrides:
            key, place = tuple(override.lstrip("+~").partition("=")[0].split(".")), f"override {override!r}"
            for length in range(1, len(key)):
                self._places.setdefault(key[:length], place)
            self._places[key] = place

    def of(self, key: KeyPath) -> str:
        """The place of a key, or of the nearest section around it that has a place.

        A key that arrived through an interpolation is found where it was written.
        """
        for _ in range(MAX_LINKS):
            length = next((n for n in range(len(key), 0, -1) if key[:n] in self._places), 0)
            head, tail = key[:length], key[length:]
            if not tail or head not in self._links:
                break
            key = self._links[head] + tail
        return self._places.get(head, self._file)

    def _walk(self, node: yaml.Node | None, prefix: KeyPath, file: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == "<<":
                    self._walk(value, prefix, file)
                    continue
                path = (*prefix, key.value)
                self._places[path] = f"{file}:{key.start_mark.line + 1}"
                self._walk(value, path, file)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._places[(*prefix, index)] = f"{file}:{item.start_mark.line + 1}"
                self._walk(item, (*prefix, index), file)
        elif isinstance(node, yaml.ScalarNode) and (match := _INTERPOLATION.fullmatch(node.value.strip())):
            self._links[prefix] = tuple(match.group(1).split("."))
