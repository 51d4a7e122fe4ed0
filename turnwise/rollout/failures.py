"""Counts failures of episodes by kind, and stops the run if there are too many."""

import re
from collections import Counter
from collections.abc import Sequence

from turnwise.errors import RolloutError, counted
from turnwise.types import Task, Trajectory


class Failures:
    """Counts the failed episodes of one batch, and stops the run if more than `allowed` of its `num_episodes` fail."""

    def __init__(self, allowed: float = 0.0, num_episodes: int = 0) -> None:
        self.allowed = allowed
        self.num_episodes = num_episodes
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
                f"{counted(total, 'episode')} of this batch of {self.num_episodes} failed for good, more than "
                f"max_failed_fraction allows ({int(self.allowed)}). The most frequent error ({count}×):\n"
                f"{self._examples[kind]}\n"
                f"{_advice(self._examples[kind])} of its environment manager."
            )


def _advice(error: str) -> str:
    """What to do about an error. A reward's error gets no advice on retries, since only episodes are retried."""
    if reward := re.search(r"data\.reward [^\s;]+", error):
        return f"Fix {reward[0].rstrip(':')}, or raise max_failed_fraction"
    return "Fix the environment, or raise max_failed_fraction or max_env_retries"


def kind_of_failure(error: str, task: Task) -> str:
    """The kind of a failure: equal for episodes that fail alike, whatever their task."""
    return headline(error).replace(task.id, "…")


def headline(error: str) -> str:
    """The line with an error's message: the last one that isn't indented."""
    return next((line for line in reversed(error.splitlines()) if not line.startswith(" ")), "")
