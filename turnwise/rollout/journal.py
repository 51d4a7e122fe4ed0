"""`rollouts.jsonl`: every played trajectory as one line of JSON, which holds all that training needs, except
media."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TextIO

from turnwise.batching.samples import build_samples
from turnwise.errors import DataError, RolloutError
from turnwise.rollout.record import RecordKey, StateKeyWriter, read_record, write_record
from turnwise.rollout.source import played_of
from turnwise.runtime.disk import naming
from turnwise.types import Group, Trajectory

_MAX_NAMED = 3  # number of lines or groups that a message lists one by one


class Journal:
    """Appends trajectories to a file. The file is flushed after each step, so a crash loses at most the
    current step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, step: int, groups: Iterable[Group]) -> None:
        """Writes the groups of one step, with advantages if there are any."""
        with naming(self._path):
            for group in groups:
                self._file.writelines(line + "\n" for line in write_group(step, group))
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


def write_group(step: int, group: Group) -> list[str]:
    """The lines of one group, its greedy trajectory last."""
    played, keys = played_of(group), StateKeyWriter()
    places = (
        RecordKey(step, group.index, len(played), group.rejected, trajectory is group.greedy)
        for trajectory in played
    )
    return [write_record(place, trajectory, keys) for place, trajectory in zip(places, played, strict=True)]


def read_group(lines: Iterable[str], temperature: float | None = None) -> Group:
    """The group that `write_group` wrote, with samples for a trainer whose temperature is `temperature`."""
    group = _group([read_record(line) for line in lines])
    for trajectory in played_of(group):
        trajectory.samples = build_samples(trajectory, temperature)
    return group


def read_journal(path: Path) -> Sequence[tuple[int, Trajectory]]:
    """`(step, trajectory)` of every line. Raises DataError if a line can't be read; `read_groups` leaves such
    lines out."""
    rows = []
    for number, content, fault in _lines(path):
        if content is None:
            raise DataError(
                f"{path}, line {number}: not a trajectory ({fault}); was the file cut in the middle?"
            )
        place, trajectory = content
        rows.append((place.step, trajectory))
    return rows


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a `rollouts.jsonl`."""

    groups: list[Group]
    """The complete groups in the order of the file, with their samples. Rejected groups are included."""
    lost: list[str]
    """Sentences that name the unreadable lines and incomplete groups, which were left out."""


def read_groups(path: Path, temperature: float | None = None) -> Recording:
    """Reads a file's groups, with samples for a trainer whose temperature is `temperature`. Raises DataError
    if the file has no complete group, or a trajectory can't be trained on."""
    lines = list(_lines(path))
    groups, broken = list[Group](), []
    for _, rows in groupby(
        (line.content for line in lines if line.content), lambda row: (row[0][:2], row[1].task.id)
    ):
        members = list(rows)
        place, first = members[0]
        if len(members) == place.group_length:
            groups.append(_group(members))
        else:
            broken.append(f"{first.task.id} ({len(members)} of {place.group_length} trajectories)")
    unreadable, lost = [line for line in lines if line.content is None], list[str]()
    if unreadable:
        numbers = _named([str(line.number) for line in unreadable], "lines")
        lost.append(
            f"{len(unreadable)} of {len(lines)} lines can't be read ({unreadable[0].fault}): {numbers}"
        )
    if broken:
        lost.append(f"left out as incomplete: {_named(broken, 'groups')}")
    if not groups:
        found = "; ".join(lost) or "it is empty"
        raise DataError(
            f"{path} holds no complete group of trajectories: {found}; `turnwise rollout CONFIG` writes "
            f"such files"
        )
    for trajectory in (trajectory for group in groups for trajectory in played_of(group)):
        try:
            # The run that trains counts its own policy versions.
            trajectory.samples = [
                replace(sample, versions=()) for sample in build_samples(trajectory, temperature)
            ]
        except RolloutError as fault:
            raise DataError(f"{path}: {trajectory.task.id}, sibling {trajectory.sibling}: {fault}") from fault
    return Recording(groups, lost)


class _JournalLine(NamedTuple):
    number: int
    content: tuple[RecordKey, Trajectory] | None
    fault: str = ""


def _lines(path: Path) -> Iterator[_JournalLine]:
    if not path.is_file():
        found = "is a folder; name the rollouts.jsonl in it" if path.is_dir() else "there is no such file"
        raise DataError(f"{path}: {found}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _JournalLine(number, read_record(line))
            except ValueError as fault:
                yield _JournalLine(number, None, str(fault))


def _group(members: Sequence[tuple[RecordKey, Trajectory]]) -> Group:
    place, first = members[0]
    siblings = [trajectory for own, trajectory in members if not own.is_baseline]
    greedy = next((trajectory for own, trajectory in members if own.is_baseline), None)
    return Group(first.task, siblings, place.group, greedy, place.rejected)


def _named(names: Sequence[str], noun: str) -> str:
    left_out = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {left_out} more {noun}" if left_out > 0 else "")
