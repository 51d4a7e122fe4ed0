"""The contract of a run's source of batches."""

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Literal, NamedTuple, Protocol

from turnwise.types import Group, Trajectory

Rejection = Literal["failed", "filtered", "stale"]
ScoreGroup = Callable[[Group], Awaitable[list[Trajectory]]]
"""Adds the rewards of a group to its trajectories. Returns the trajectories that failed because they couldn't
be scored."""


class Part(NamedTuple):
    """Some groups of a batch, and whether they are the last."""

    groups: list[Group]
    is_last: bool = True


class RolloutSource(Protocol):
    """Groups of trajectories, batch by batch: played (`scheduler`), or read from a file (`replay`)."""

    rejected: list[Group]
    """Groups rejected since the previous batch. They are written to the journal, but not trained on."""
    score: ScoreGroup | None
    """Scores groups; None if all rewards come from environments."""
    num_episodes: int
    """Number of episodes handed out since the run began."""

    @property
    def group_size(self) -> int: ...

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches have been handed out."""

    def get_batch(self, num_trajectories: int) -> list[Group]:
        """The next `num_trajectories` trajectories in complete groups; fewer if a filter drops many or the
        tasks run out."""

    def parts(self, num_trajectories: int, is_streamed: bool) -> Generator[Part]:
        """Yields the batch as one part or, if streamed, as one or more, each with the groups selected since
        the previous part. Only the last part may be empty. A caller that stops early must close the
        generator."""

    def describe(self) -> str:
        """A short description for the table that a run prints at its start."""

    def close(self) -> None:
        """Ends all episodes that are playing."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def played_of(group: Group) -> list[Trajectory]:
    """All trajectories of a group, the greedy one last."""
    if group.greedy is None:
        return group.trajectories
    return [*group.trajectories, group.greedy]
