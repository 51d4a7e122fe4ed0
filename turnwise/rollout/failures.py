"""Counts failures of episodes by kind, and ends the run if there are too many."""

import re
from collections import Counter
from collections.abc import Sequence

from turnwise.errors import RolloutError, counted
from turnwise.types import Task, Trajectory


class Failures:
    """Counts the failed episodes of one batch."""

    def __init__(self) -> None:
        self._num_allowed = 0.0
        self._num_episodes = 0
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def begin(self, num_episodes: int, max_fraction: float, needs_success: bool) -> None:
        """Begins a batch of `num_episodes`, of which the share `max_fraction` may fail, but not all if
        `needs_success`."""
        # Rounded, since 0.29 × 100 is a little less than 29 in binary.
        self._num_allowed = round(max_fraction * num_episodes, 6)
        if needs_success:
            self._num_allowed = min(self._num_allowed, num_episodes - 1)
        self._num_episodes = num_episodes

    def clear(self) -> None:
        """Forgets what was counted."""
        self._counts.clear()
        self._examples.clear()

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts failed episodes. If too many have failed, raises a RolloutError that quotes the most
        frequent error."""
        failed = {(t.task.id, t.sibling): t for t in trajectories if t.error is not None}
        for trajectory in failed.values():
            error = trajectory.error or ""
            kind = kind_of_failure(error, trajectory.task)
            self._counts[kind] += 1
            self._examples.setdefault(kind, error)
        total = self._counts.total()
        if total > self._num_allowed:
            kind, count = self._counts.most_common(1)[0]
            example = self._examples[kind]
            raise RolloutError(
                f"{counted(total, 'episode')} of this batch of {self._num_episodes} failed for good, more "
                f"than max_failed_fraction allows ({int(self._num_allowed)}). The most frequent error "
                f"({count}×):\n{example}\n"
                f"{_advice(example)} of its environment manager."
            )


def _advice(error: str) -> str:
    """What to do about an error. The advice on a reward's error doesn't mention retries, since only episodes
    are retried."""
    reward = re.search(r"data\.reward [^\s;]+", error)
    if reward is not None:
        return f"Fix {reward[0].rstrip(':')}, or raise max_failed_fraction"
    return "Fix the environment, or raise max_failed_fraction or max_env_retries"


def kind_of_failure(error: str, task: Task) -> str:
    """The message of an error without the task's id and row: the same for episodes of different tasks that
    fail alike."""
    kind = headline(error)
    kind = kind.replace(task.place, "…")
    return kind.replace(task.id, "…")


def headline(error: str) -> str:
    """The line with the message in an error's text or traceback: the last line that isn't indented. If all
    lines are indented (an exception group), the last line with text, which is the message of one of the
    group's exceptions."""
    lines = error.splitlines()[::-1]
    unindented = (line for line in lines if not line.startswith(" "))
    stripped = (line.strip(" |+-") for line in lines)
    return next(unindented, "") or next(filter(None, stripped), "")
