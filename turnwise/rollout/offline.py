"""Hands out rollouts that `journal.read_groups` has read from a file, instead of playing episodes."""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import CheckpointError, RolloutError
from turnwise.rollout.source import Part, ScoreGroup
from turnwise.types import Group


@dataclass
class OfflineRollouts:
    """A `RolloutSource` that hands out each of the recorded `groups` once, in order. `name` is the file's
    name, for messages. `get_batch` raises RolloutError if too few groups are left."""

    groups: Sequence[Group]
    group_size: int
    name: str
    num_episodes: int = 0
    score: ScoreGroup | None = None
    rejected: list[Group] = field(default_factory=list)
    batch_size: int = 0
    """Number of trajectories in each batch of this run."""

    @property
    def is_exhausted(self) -> bool:
        return self.num_episodes + self.batch_size > len(self.groups) * self.group_size

    def num_batches(self, num_trajectories: int) -> int:
        """Number of complete batches of `num_trajectories` in the file."""
        return len(self.groups) * self.group_size // num_trajectories

    def describe(self) -> str:
        return f"read from {self.name}, which has {len(self.groups)} groups"

    def get_batch(self, num_trajectories: int) -> list[Group]:
        groups = list(
            self.groups[self.num_episodes // self.group_size :][: num_trajectories // self.group_size]
        )
        if len(groups) * self.group_size < num_trajectories:
            raise RolloutError(
                f"{self.name} is at its end: {len(groups)} groups are left, too few for {num_trajectories}"
            )
        self.num_episodes += num_trajectories
        return groups

    def parts(self, num_trajectories: int, is_streamed: bool) -> Generator[Part]:
        """Yields the batch as one part, since there is nothing to wait for."""
        yield Part(self.get_batch(num_trajectories))

    def close(self) -> None:
        """Does nothing: no episode plays."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the file, and a hash of the rollouts before it."""
        return {"num_episodes": self.num_episodes, "replayed_sha256": self._digest(self.num_episodes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        num_episodes = state["num_episodes"]
        if state.get("replayed_sha256") != self._digest(num_episodes):
            raise CheckpointError(
                f"this checkpoint wasn't saved by a run that trained from {self.name} as it is now, so its "
                f"position means "
                "nothing; restore the file, or start a new run from the weights with pretrain"
            )
        self.num_episodes = num_episodes

    def _digest(self, num_episodes: int) -> str:
        digest = hashlib.sha256()
        for group in self.groups[: num_episodes // self.group_size]:
            for trajectory in group.trajectories:
                digest.update(f"{trajectory.task.id}/{trajectory.sibling}/{trajectory.score!r}".encode())
                for turn in trajectory.turns:
                    digest.update(turn.response_ids.tobytes())
        return digest.hexdigest()
