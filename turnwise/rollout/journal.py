"""`rollouts.jsonl`: every played trajectory as one line of JSON, which holds all that training needs, except
media."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple, TextIO

from turnwise.batching.samples import build_samples
from turnwise.errors import DataError, RolloutError
from turnwise.rollout.record import RecordKey, StateKeyWriter, read_record, write_record
from turnwise.rollout.source import played_of
from turnwise.runtime.disk import naming
from turnwise.types import Group, Trajectory

_MAX_LISTED = 3  # number of lines or groups that a message lists one by one


class Journal:
    """Appends trajectories to a file, and those of validations to another one if `validation` names it. A
    file is flushed after each step, so a crash loses at most the current step."""

    def __init__(self, path: Path, validation: Path | None = None) -> None:
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._validation: Journal | None = None
        if validation is not None:
            self._validation = Journal(validation)

    def append(self, step: int, groups: Iterable[Group]) -> None:
        """Writes the groups of one step, with advantages if there are any."""
        with naming(self._path):
            for group in groups:
                self._file.writelines(line + "\n" for line in write_group(step, group))
            self._file.flush()

    def append_validation(self, step: int, groups: Iterable[Group]) -> None:
        """Writes the groups of a validation, if they have a file."""
        if self._validation is not None:
            self._validation.append(step, groups)

    def close(self) -> None:
        if self._validation is not None:
            self._validation.close()
        with naming(self._path):
            self._file.close()


def write_group(step: int, group: Group) -> list[str]:
    """The lines of one group, its greedy trajectory last."""
    played = played_of(group)
    state_keys = StateKeyWriter()
    lines = []
    for trajectory in played:
        key = RecordKey(
            step,
            group.index,
            group_length=len(played),
            rejected=group.rejected,
            is_baseline=trajectory is group.greedy,
        )
        lines.append(write_record(key, trajectory, state_keys))
    return lines


def read_group(lines: Iterable[str], temperature: float | None = None) -> Group:
    """The group that `write_group` wrote, with samples for a trainer whose temperature is `temperature`."""
    group = _group([read_record(line) for line in lines])
    for trajectory in played_of(group):
        trajectory.samples = build_samples(trajectory, temperature)
    return group


def read_journal(path: Path) -> Sequence[tuple[int, Trajectory]]:
    """`(step, trajectory)` of every line. Raises DataError if a line can't be read; `read_groups` leaves such
    lines out."""
    steps = []
    for number, content, fault in _lines(path):
        if content is None:
            raise DataError(
                f"{path}, line {number}: not a trajectory ({fault}); was the file cut in the middle?"
            )
        key, trajectory = content
        steps.append((key.step, trajectory))
    return steps


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a `rollouts.jsonl`."""

    groups: list[Group]
    """The complete groups in the order of the file, with their samples. Rejected groups are included."""
    lost: list[str]
    """Sentences that name the unreadable lines and incomplete groups, which aren't in `groups`."""


def read_groups(path: Path, temperature: float | None = None) -> Recording:
    """Reads a file's groups, with samples for a trainer whose temperature is `temperature`. Raises DataError
    if the file has no complete group, or a trajectory can't be trained on."""
    lines = list(_lines(path))
    groups: list[Group] = []
    incomplete: list[str] = []
    readable = [line.content for line in lines if line.content is not None]
    for _, members in groupby(readable, _group_of):
        group_lines = list(members)
        key, first = group_lines[0]
        if len(group_lines) == key.group_length:
            groups.append(_group(group_lines))
        else:
            incomplete.append(f"{first.task.id} ({len(group_lines)} of {key.group_length} trajectories)")
    unreadable = [line for line in lines if line.content is None]
    lost: list[str] = []
    if unreadable:
        numbers = _listed([str(line.number) for line in unreadable], "lines")
        lost.append(
            f"{len(unreadable)} of {len(lines)} lines can't be read ({unreadable[0].fault}): {numbers}"
        )
    if incomplete:
        lost.append(f"left out as incomplete: {_listed(incomplete, 'groups')}")
    if not groups:
        reason = "; ".join(lost) or "it is empty"
        raise DataError(
            f"{path} holds no complete group of trajectories: {reason}; `turnwise rollout CONFIG` writes "
            "such files"
        )
    for trajectory in chain.from_iterable(map(played_of, groups)):
        try:
            samples = build_samples(trajectory, temperature)
        except RolloutError as fault:
            raise DataError(f"{path}: {trajectory.task.id}, sibling {trajectory.sibling}: {fault}") from fault
        # The run that trains counts its own policy versions.
        trajectory.samples = [replace(sample, versions=()) for sample in samples]
    return Recording(groups, lost)


def _group_of(content: tuple[RecordKey, Trajectory]) -> tuple[int, int, str]:
    key, trajectory = content
    return key.step, key.group, trajectory.task.id


class _JournalLine(NamedTuple):
    number: int
    content: tuple[RecordKey, Trajectory] | None
    fault: str = ""


def _lines(path: Path) -> Iterator[_JournalLine]:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name the rollouts.jsonl in it")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _JournalLine(number, read_record(line))
            except ValueError as fault:
                yield _JournalLine(number, None, str(fault))


def _group(members: Sequence[tuple[RecordKey, Trajectory]]) -> Group:
    first_key, first = members[0]
    siblings = [trajectory for key, trajectory in members if not key.is_baseline]
    baselines = [trajectory for key, trajectory in members if key.is_baseline]
    greedy = baselines[0] if baselines else None
    return Group(first.task, siblings, first_key.group, greedy, first_key.rejected)


def _listed(names: Sequence[str], noun: str) -> str:
    text = ", ".join(names[:_MAX_LISTED])
    num_more = len(names) - _MAX_LISTED
    if num_more > 0:
        text += f" and {num_more} more {noun}"
    return text
