"""Rollouts from a file instead of played ones."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from turnwise.batching.samples import build_samples
from turnwise.errors import CheckpointError, DataError, RolloutError
from turnwise.rollout.journal import Line, read_lines
from turnwise.rollout.record import RecordKey
from turnwise.rollout.source import Part, ScoreGroup, played_of
from turnwise.types import Group, Trajectory

_MAX_NAMED = 3
"""Number of lines or groups that a message lists one by one."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a `rollouts.jsonl`: its whole groups in the order of the file, and a sentence about each loss."""

    path: Path
    groups: list[Group]
    """The groups with their samples, rejected groups included."""
    losses: list[str]


def read_groups(path: Path) -> Recording:
    """Reads the groups of a file. It leaves out, and names, cut lines, lines that are no trajectory, and groups with missing
    lines.

    Raises:
        DataError: there is no such file, or no whole group in it.
    """
    lines = list(read_lines(path))
    good = [(line.number, *line.content) for line in lines if line.content]
    groups, broken = [], []
    for (_, index, _), rows in groupby(good, key=lambda row: (row[1].step, row[1].group, row[2].task.id)):
        members = [(place, trajectory) for _, place, trajectory in rows]
        place, first = members[0]
        if len(members) == place.group_length:
            groups.append(_group(path, index, members))
        else:
            broken.append(f"{first.task.id} ({len(members)} of {place.group_length} trajectories)")
    losses = _lost_lines([line for line in lines if line.content is None], len(lines))
    if broken:
        losses.append(f"left out as incomplete: {_named(broken, 'groups')}")
    if not groups:
        found = "; ".join(losses) or "it is empty"
        raise DataError(f"{path} holds no whole group of trajectories: {found}; `turnwise rollout CONFIG` writes such files")
    return Recording(path, groups, losses)


def _group(path: Path, index: int, members: Sequence[tuple[RecordKey, Trajectory]]) -> Group:
    trajectories = [trajectory for place, trajectory in members if not place.is_baseline]
    greedy = next((trajectory for place, trajectory in members if place.is_baseline), None)
    place, first = members[0]
    group = Group(first.task, trajectories, index, greedy, place.rejected)
    for trajectory in played_of(group):
        try:
            # Policy versions of the run that played mean nothing in the one that trains.
            trajectory.samples = [replace(sample, versions=()) for sample in build_samples(trajectory)]
        except RolloutError as fault:
            raise DataError(f"{path}: {trajectory.task.id}, sibling {trajectory.sibling}: {fault}") from fault
    return group


def _lost_lines(lost: Sequence[Line], num_lines: int) -> list[str]:
    if not lost:
        return []
    numbers = _named([str(line.number) for line in lost], "lines")
    return [f"{len(lost)} of {num_lines} lines can't be read ({lost[0].fault}): {numbers}"]


def _named(names: Sequence[str], noun: str) -> str:
    left_out = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {left_out} more {noun}" if left_out > 0 else "")


class RolloutReplay:
    """A `RolloutSource` that hands out recorded groups once, in their order."""

    def __init__(self, groups: Sequence[Group], group_size: int, name: str) -> None:
        self.num_episodes = 0
        self.score: ScoreGroup | None = None
        self.rejected: list[Group] = []
        self._groups = groups
        self._group_size = group_size
        self._name = name

    @property
    def group_size(self) -> int:
        return self._group_size

    @property
    def is_exhausted(self) -> bool:
        return False

    def num_batches(self, num_trajectories: int) -> int:
        """Number of whole batches."""
        return len(self._groups) * self._group_size // num_trajectories

    def describe(self) -> str:
        return f"read from {self._name}, which has {len(self._groups)} groups"

    def get_batch(self, num_trajectories: int) -> list[Group]:
        """Raises:
        RolloutError: the file is at its end.
        """
        start = self.num_episodes // self._group_size
        groups = list(self._groups[start : start + num_trajectories // self._group_size])
        if len(groups) * self._group_size < num_trajectories:
            raise RolloutError(f"{self._name} is at its end: {len(groups)} groups are left, too few for {num_trajectories}")
        self.num_episodes += num_trajectories
        return groups

    def parts(self, num_trajectories: int, is_streamed: bool) -> Generator[Part]:
        """The batch as one part: there is nothing to wait for."""
        yield Part(self.get_batch(num_trajectories))

    def close(self) -> None:
        """Does nothing: no episode plays."""

    def state_dict(self) -> dict[str, Any]:
        """The position, and a hash of the rollouts before it."""
        return {"num_episodes": self.num_episodes, "replayed_sha256": self._digest(self.num_episodes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        CheckpointError: another file was trained from, or none.
        """
        num_episodes = state["num_episodes"]
        if state.get("replayed_sha256") != self._digest(num_episodes):
            raise CheckpointError(
                f"this checkpoint wasn't saved by a run that trained from {self._name} as it is now, so its position means "
                "nothing; bring the file back, or start a new run from the weights with pretrain"
            )
        self.num_episodes = num_episodes

    def _digest(self, num_episodes: int) -> str:
        """A hash of the tokens and scores up to the position."""
        digest = hashlib.sha256()
        for group in self._groups[: num_episodes // self._group_size]:
            for trajectory in group.trajectories:
                digest.update(f"{trajectory.task.id}/{trajectory.sibling}/{trajectory.score!r}".encode())
                for turn in trajectory.turns:
                    digest.update(turn.response_ids.tobytes())
        return digest.hexdigest()
