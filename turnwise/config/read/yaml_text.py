"""Reads YAML files as UTF-8, limits their size after anchors and interpolations are expanded, and finds the
lines of keys."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from turnwise.config.problems import Path as KeyPath
from turnwise.config.read.yaml_words import WordLoader
from turnwise.errors import ConfigError
from turnwise.spec.package_tables import YAML_LOADER

MAX_BYTES = 2**20
"""Maximum bytes of a YAML file."""
MAX_SIZE = 100_000
"""Maximum number of values in a file. A long text counts as several values."""
MAX_DEPTH = 64
"""Maximum levels of nested sections."""
_TEXT_UNIT = 64  # characters of a text that count as one value
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*(\.*)([^${}:\s]+)\s*\}")


def read_yaml(file: Path, name: str = "") -> str:
    """The text of a YAML file, called `name` in messages. Raises ConfigError if it can't be read, is too long
    or not UTF-8."""
    name = name or str(file)
    try:
        if file.exists() and not file.is_file():  # reading a pipe would wait
            raise ConfigError(f"{name} isn't a file that can be read")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as fault:
        raise ConfigError(f"{name} can't be read: {fault.strerror}") from fault
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} has more than {MAX_BYTES:,} bytes, the limit of a YAML file; shorten it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise ConfigError(
            f"{name}:{line} isn't UTF-8 (byte 0x{data[fault.start]:02x}); save the file as UTF-8"
        ) from fault
    return text


def load_yaml(text: str, name: str) -> Any:
    """The value of a YAML text, whose words mean what they mean in a config (`1e-3` is a number). Raises
    ConfigError if `require_bounded` does, or a mapping has a key twice.

    >>> load_yaml("a: &a {b: *a}", "own.yaml")
    Traceback (most recent call last):
    ... turnwise.errors.ConfigError: own.yaml:1: the alias *a stands inside its own anchor; write out what it
    should hold
    """
    require_bounded(text, name)
    try:
        return yaml.load(text, Loader=WordLoader)
    except (yaml.YAMLError, ValueError) as fault:
        raise ConfigError(f"{name} can't be read: {' '.join(str(fault).split())}") from fault


def require_bounded(text: str, name: str) -> None:
    """Raises ConfigError if the text isn't YAML, or is too large, too deep or endless once its anchors are
    expanded."""
    anchored: dict[str, tuple[int, int]] = {}
    sections: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    line = 1
    try:
        # Events come one by one, before anything is nested or expanded, so a hostile file costs no memory.
        for event in yaml.parse(text, Loader=YAML_LOADER):
            line = event.start_mark.line + 1 if event.start_mark else line
            anchor, size, depth = None, 1, 0
            if isinstance(event, yaml.CollectionStartEvent):
                sections.append((event.anchor, 1, 0))
                _require(len(sections), 0, name, line)
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size, depth = sections.pop()
                depth += 1
            elif isinstance(event, yaml.ScalarEvent):
                anchor, size = event.anchor, 1 + len(event.value) // _TEXT_UNIT
            elif isinstance(event, yaml.AliasEvent):
                if any(event.anchor == opened for opened, _, _ in sections):
                    what = (
                        f"the alias *{event.anchor} stands inside its own anchor; write out what it "
                        f"should hold"
                    )
                    raise ConfigError(f"{name}:{line}: {what}")
                size, depth = anchored.get(event.anchor or "", (1, 0))
            else:
                continue
            if anchor is not None:
                anchored[anchor] = size, depth
            outer, total, levels = sections[-1]
            sections[-1] = outer, total + size, max(levels, depth)
            _require(len(sections) + depth, total + size, name, line)
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        # To libyaml the end of a text is a line of its own.
        line = min(mark.line + 1, len(text.splitlines())) if mark else line
        raise ConfigError(f"{name}:{line} can't be read: {fault.problem or fault.context}") from fault
    except (yaml.YAMLError, UnicodeEncodeError) as fault:
        before = text[: fault.start] if isinstance(fault, UnicodeEncodeError) else ""
        if isinstance(fault, yaml.reader.ReaderError):  # libyaml counts bytes, and names no encoding
            before = (
                text.encode()[: fault.position].decode(errors="replace")
                if fault.encoding == "?"
                else text[: fault.position]
            )
        line = len(f"{before}.".splitlines())
        raise ConfigError(f"{name}:{line} can't be read: {str(fault).splitlines()[0]}") from fault


def require_bounded_references(values: Any, name: str) -> None:
    """Raises ConfigError if a key has too many values after interpolations (`${key}`) are expanded.

    >>> bomb = {"a": "text " * 99, "b": "${a}" * 99, "c": "${b}" * 99, "d": "${c}" * 99}
    >>> require_bounded_references(bomb, "own.yaml")
    Traceback (most recent call last):
    ...
    turnwise.errors.ConfigError: own.yaml: d has over 100,000 values once its ${...} are resolved; use fewer
    """
    sizes: dict[KeyPath, int] = {}

    def size_at(path: KeyPath, value: Any) -> int:
        if path not in sizes:
            sizes[path] = 0  # a reference to itself is refused when it is resolved
            parts = list(_children(value))
            sizes[path] = 1 + sum(size_at((*path, key), item) for key, item in parts)
            if isinstance(value, str):
                sizes[path] += len(value) // _TEXT_UNIT
                for match in _REFERENCE.finditer(value):
                    sizes[path] += size_at(*_target(values, path, match))
            if path and sizes[path] > MAX_SIZE:
                key = ".".join(str(part) for part in path)
                raise ConfigError(
                    f"{name}: {key} has over {MAX_SIZE:,} values once its ${{...}} are resolved; use fewer"
                )
        return sizes[path]

    size_at((), values)


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        yield from enumerate(value)


def _target(values: Any, path: KeyPath, match: re.Match[str]) -> tuple[KeyPath, Any]:
    """Path and value of an interpolation's target, or of another interpolation that is on the way to it."""
    dots, rest = match.groups()
    found: KeyPath = ()
    names = [
        *(path[: len(path) - len(dots)] if dots else ()),
        *(part for part in re.split(r"[.\[\]]", rest) if part),
    ]
    for name in names:
        inner = {str(key): (key, item) for key, item in _children(values)}
        if str(name) not in inner:
            break
        key, values = inner[str(name)]
        found = (*found, key)
    return found, values


def _require(depth: int, size: int, name: str, line: int) -> None:
    if depth > MAX_DEPTH + 1:
        raise ConfigError(f"{name}:{line}: more than {MAX_DEPTH} nested sections; a config has a few")
    if size > MAX_SIZE:
        raise ConfigError(
            f"{name}:{line}: more than {MAX_SIZE:,} values once its anchors are expanded; use fewer"
        )


MAX_LINKS = 16
"""Maximum number of interpolations that are followed in a row, since they may form a circle."""
_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.-]*)\}")


def display(path: Path) -> str:
    """The path, relative to the working directory if it lies in that directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


class KeyLocations:
    """Places of keys in YAML files and overrides, for messages. Later files win over earlier ones, overrides
    over files."""

    def __init__(self, files: Sequence[Path], overrides: Sequence[str] = ()) -> None:
        self._file = display(files[-1]) if files else ""
        self._places: dict[KeyPath, str] = {}
        self._links: dict[KeyPath, KeyPath] = {}
        for file in files:
            with suppress(yaml.YAMLError, UnicodeDecodeError):
                self._walk(
                    yaml.compose(file.read_text(encoding="utf-8"), Loader=YAML_LOADER), (), display(file)
                )
        for override in overrides:
            key, place = tuple(override.lstrip("+~").partition("=")[0].split(".")), f"override {override!r}"
            for length in range(1, len(key)):
                self._places.setdefault(key[:length], place)
            self._places[key] = place

    def of(self, key: KeyPath) -> str:
        """The place of a key, of what it interpolates, or of the nearest section around it; else the last
        file, if any."""
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
