"""Counts failures of episodes by kind, and stops the run at too many."""

from collections import Counter
from collections.abc import Sequence

from turnwise.errors import RolloutError
from turnwise.types import Task, Trajectory


class Failures:
    """Counts the failed episodes of one batch, and stops the run if there are more than `allowed`."""

    def __init__(self, allowed: float = 0.0) -> None:
        self.allowed = allowed
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts the failed ones of these trajectories. Raises RolloutError if there are too many."""
        for trajectory in trajectories:
            if trajectory.error is not None:
                kind = kind_of_failure(trajectory.error, trajectory.task)
                self._counts[kind] += 1
                self._examples.setdefault(kind, trajectory.error)
        if (total := self._counts.total()) > self.allowed:
            kind, count = self._counts.most_common(1)[0]
            raise RolloutError(
                f"{total} episode{'s' if total > 1 else ''} of this batch failed for good, more than "
                f"max_failed_fraction allows ({self.allowed:g}). The most frequent error ({count}×):\n"
                f"{self._examples[kind]}\n"
                "Fix the environment, or raise max_failed_fraction or max_env_retries of its environment manager."
            )


def kind_of_failure(error: str, task: Task) -> str:
    """The kind of a failure: equal for episodes that fail alike, whatever their task."""
    return headline(error).replace(task.id, "…")


def headline(error: str) -> str:
    """The last line of a traceback that isn't indented: lines of stacks are."""
    return next((line for line in reversed(error.splitlines()) if not line.startswith(" ")), "")
