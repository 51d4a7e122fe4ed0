"""Environments of a few lines: what a policy learns in them is seen at a glance."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.base import Step, TextEnv
from turnwise.types import Reduction


class BanditEnv(TextEnv):
    """One turn with one right answer, the same in every episode: what a policy must find is which."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"success": "last"}

    def __init__(self, arms: Sequence[str] = ("a", "b", "c", "d"), best: str = "b") -> None:
        self.actions = tuple(arms)
        self._best = best

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "pull " + " ".join(self.actions), {}

    def step(self, action: str) -> Step:
        reward = float(action == self._best)
        return "done", reward, True, False, {"metrics": {"success": reward}}


class IdentityEnv(TextEnv):
    """Each turn shows a token and wants it back; every right answer is worth its share of 1."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"success": "mean"}

    def __init__(self, tokens: Sequence[str] = ("a", "b", "c", "d"), num_turns: int = 3) -> None:
        self.actions = tuple(tokens)
        self._num_turns = num_turns
        self._shown: list[str] = []
        self._turn = 0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._shown = random.Random(seed).choices(self.actions, k=self._num_turns)
        self._turn = 0
        return self._shown[0], {}

    def step(self, action: str) -> Step:
        is_right = action == self._shown[self._turn]
        self._turn += 1
        is_over = self._turn == self._num_turns
        observation = "done" if is_over else self._shown[self._turn]
        return (
            observation,
            is_right / self._num_turns,
            is_over,
            False,
            {"metrics": {"success": float(is_right)}},
        )


class KindsEnv(TextEnv):
    """Each turn names a kind of character and wants one of it, so that random answers are right now and then
    and the right ones depend on what is shown. Every right answer is worth its share of 1."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"success": "mean"}
    KINDS: ClassVar[Mapping[str, Callable[[str], bool]]] = {
        "l": str.islower,
        "u": str.isupper,
        "d": str.isdigit,
    }

    def __init__(self, num_turns: int = 3) -> None:
        self._num_turns = num_turns
        self._wanted: list[str] = []

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._wanted = random.Random(seed).choices(list(self.KINDS), k=self._num_turns)
        return self._wanted[0], {}

    def step(self, action: str) -> Step:
        is_right = self.KINDS[self._wanted.pop(0)](action)
        observation = self._wanted[0] if self._wanted else "done"
        return (
            observation,
            is_right / self._num_turns,
            not self._wanted,
            False,
            {"metrics": {"success": float(is_right)}},
        )


class LettersEnv(TextEnv):
    """Wants lower-case letters: a turn's reward is their share of the answer, so that random answers differ
    from the start."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"success": "mean"}

    def __init__(self, num_turns: int = 2) -> None:
        self._num_turns = num_turns
        self._turn = 0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return f"write {random.Random(seed).randrange(1000)}", {}

    def step(self, action: str) -> Step:
        self._turn += 1
        share = sum(letter.islower() for letter in action) / max(len(action), 1)
        return "more", share, self._turn == self._num_turns, False, {"metrics": {"success": share}}


class GatedLettersEnv(LettersEnv):
    """As `LettersEnv`, but after the first step of the run in the working folder each episode waits there for
    a file `gate`."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        while (
            any(file.stat().st_size for file in Path("runs").glob("*/*/metrics.jsonl"))
            and not Path("gate").exists()
        ):
            time.sleep(0.05)
        return super().reset(seed=seed)
