"""`rollouts.jsonl`: every played trajectory, complete enough to train from again, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from turnwise.batching.samples import build_samples
from turnwise.errors import DataError
from turnwise.rollout.record import RecordKey, read_record, write_record
from turnwise.rollout.source import played_of
from turnwise.rollout.state_keys import StateKeyWriter
from turnwise.types import Group, Trajectory


class Journal:
    """Appends trajectories to a file, flushed once a step so that a crash loses at most the step in hand."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, step: int, groups: Iterable[Group]) -> None:
        """Writes the trajectories of one step, with their advantages if they have any. The lines of a group follow each other,
        its greedy trajectory last."""
        for group in groups:
            self._file.writelines(line + "\n" for line in write_group(step, group))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_group(step: int, group: Group) -> list[str]:
    """The lines of one group, its greedy trajectory last."""
    played, keys = played_of(group), StateKeyWriter()
    places = (RecordKey(step, group.index, len(played), group.rejected, trajectory is group.greedy) for trajectory in played)
    return [write_record(place, trajectory, keys) for place, trajectory in zip(places, played, strict=True)]


def read_group(lines: Iterable[str]) -> Group:
    """The group of `write_group`, with its samples.

    Raises:
        ValueError: a line is cut, or a field isn't what it must be.
    """
    places, played = zip(*map(read_record, lines), strict=True)
    for trajectory in played:
        trajectory.samples = build_samples(trajectory)
    siblings = [trajectory for place, trajectory in zip(places, played, strict=True) if not place.is_baseline]
    greedy = next((trajectory for place, trajectory in zip(places, played, strict=True) if place.is_baseline), None)
    return Group(played[0].task, siblings, places[0].group, greedy, places[0].rejected)


class Line(NamedTuple):
    """One line of a journal: its trajectory, or what is wrong with it."""

    number: int
    content: tuple[RecordKey, Trajectory] | None
    fault: str = ""


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of a journal, readable or not.

    Raises:
        DataError: there is no such file.
    """
    if not path.is_file():
        found = "is a folder; name the rollouts.jsonl in it" if path.is_dir() else "there is no such file"
        raise DataError(f"{path}: {found}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                content = read_record(line)
            except ValueError as fault:
                yield Line(number, None, str(fault))
            else:
                yield Line(number, content)


def read_journal(path: Path) -> Sequence[tuple[int, Trajectory]]:
    """`(step, trajectory)` of every line. `replay.read_groups` is for files that may be damaged.

    Raises:
        DataError: there is no such file, or a line, by its number, is cut or isn't a trajectory.
    """
    rows = []
    for number, content, fault in read_lines(path):
        if content is None:
            raise DataError(f"{path}, line {number}: not a trajectory ({fault}); was the file cut in the middle?")
        place, trajectory = content
        rows.append((place.step, trajectory))
    return rows
