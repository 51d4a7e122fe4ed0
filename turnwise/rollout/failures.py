"""Counts failures of episodes by kind, and ends the run if there are too many."""

import re
from collections import Counter
from collections.abc import Sequence

from turnwise.errors import RolloutError, counted
from turnwise.types import Task, Trajectory


class Failures:
    """Counts the failed episodes of one batch of `num_episodes`, of which at most `allowed` may fail."""

    def __init__(self) -> None:
        self.allowed = 0.0
        self.num_episodes = 0
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def clear(self) -> None:
        """Forgets what was counted."""
        self._counts.clear()
        self._examples.clear()

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts failed episodes. If more than `allowed` failed, raises a RolloutError that quotes the most
        frequent error."""
        errors = {(t.task.id, t.sibling): (t.error, t.task) for t in trajectories if t.error is not None}
        for error, task in errors.values():
            kind = kind_of_failure(error, task)
            self._counts[kind] += 1
            self._examples.setdefault(kind, error)
        if (total := self._counts.total()) > self.allowed:
            kind, count = self._counts.most_common(1)[0]
            raise RolloutError(
                f"{counted(total, 'episode')} of this batch of {self.num_episodes} failed for good, more "
                f"than "
                f"max_failed_fraction allows ({int(self.allowed)}). The most frequent error ({count}×):\n"
                f"{self._examples[kind]}\n"
                f"{_advice(self._examples[kind])} of its environment manager."
            )


def _advice(error: str) -> str:
    """What to do about an error. The advice on a reward's error doesn't mention retries, since only episodes
    are retried."""
    if reward := re.search(r"data\.reward [^\s;]+", error):
        return f"Fix {reward[0].rstrip(':')}, or raise max_failed_fraction"
    return "Fix the environment, or raise max_failed_fraction or max_env_retries"


def kind_of_failure(error: str, task: Task) -> str:
    """The message of an error without the task's id and row: the same for episodes of different tasks that
    fail alike."""
    return headline(error).replace(task.place, "…").replace(task.id, "…")


def headline(error: str) -> str:
    """The line with the message in an error's text or traceback: the last line that isn't indented. If all
    lines are indented (an exception group), the last line with text, which is the message of one of the
    group's exceptions."""
    lines = error.splitlines()[::-1]
    told = next((line for line in lines if not line.startswith(" ")), "")
    return told or next((text for line in lines if (text := line.strip(" |+-"))), "")
