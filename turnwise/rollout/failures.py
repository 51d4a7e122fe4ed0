"""What went wrong in episodes, by kind, and when it is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from turnwise.errors import RolloutError
from turnwise.types import Task, Trajectory


class Failures:
    """Counts failed episodes of one batch and stops the run when there are more than `allowed`."""

    def __init__(self, allowed: float = 0.0) -> None:
        self.allowed = allowed
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts what failed of an episode.

        Raises:
            RolloutError: there is now more than allowed.
        """
        for trajectory in trajectories:
            if trajectory.error is not None:
                kind = kind_of_failure(trajectory.error, trajectory.task)
                self._counts[kind] += 1
                self._examples.setdefault(kind, trajectory.error)
        if self._counts.total() > self.allowed:
            kind, count = self._counts.most_common(1)[0]
            total = self._counts.total()
            raise RolloutError(
                f"{total} episode{'s' if total > 1 else ''} of this batch failed for good, more than "
                f"max_failed_fraction allows ({self.allowed:g}). The most frequent error ({count}×):\n"
                f"{self._examples[kind]}\n"
                "Fix the environment, or raise max_failed_fraction or max_env_retries of its environment manager."
            )


def kind_of_failure(error: str, task: Task) -> str:
    """What went wrong, whatever the task: the same for all episodes that fail alike."""
    return headline(error).replace(task.id, "…")


def headline(error: str) -> str:
    """What went wrong: the last line of a traceback. The stacks below a message are indented, and so are its own."""
    return next((line for line in reversed(error.splitlines()) if not line.startswith(" ")), "")
