"""Environments of a few lines: two to learn in, and some that go wrong in one way each."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Lock
from typing import Any, ClassVar, Literal

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
        return observation, is_right / self._num_turns, is_over, False, {"metrics": {"success": float(is_right)}}


class KindsEnv(TextEnv):
    """Each turn names a kind of character and wants one of it, so that random answers are right now and then and the right
    ones depend on what is shown. Every right answer is worth its share of 1."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"success": "mean"}
    KINDS: ClassVar[Mapping[str, Callable[[str], bool]]] = {"l": str.islower, "u": str.isupper, "d": str.isdigit}

    def __init__(self, num_turns: int = 3) -> None:
        self._num_turns = num_turns
        self._wanted: list[str] = []

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._wanted = random.Random(seed).choices(list(self.KINDS), k=self._num_turns)
        return self._wanted[0], {}

    def step(self, action: str) -> Step:
        is_right = self.KINDS[self._wanted.pop(0)](action)
        observation = self._wanted[0] if self._wanted else "done"
        return observation, is_right / self._num_turns, not self._wanted, False, {"metrics": {"success": float(is_right)}}


class LettersEnv(TextEnv):
    """Wants lower-case letters: a turn's reward is their share of the answer, so that random answers differ from the start."""

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


class HesitantEnv(LettersEnv):
    """Letters, whose answers take up to 20 ms of somebody else's time, each time anew."""

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(random.SystemRandom().random() * 0.02)
        return super().step(action)


class CrowdEnv(LettersEnv):
    """Letters, whose steps may block for `delay_s`. Counts its episodes and its steps at the same time, by split."""

    now: ClassVar[Counter[str]] = Counter()
    most: ClassVar[Counter[str]] = Counter()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, num_turns: int = 2, delay_s: float = 0.0, split: str = "train") -> None:
        super().__init__(num_turns)
        self._delay_s = delay_s
        self._split = split

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._count("episodes", 1)
        return super().reset(seed=seed)

    def step(self, action: str) -> Step:
        self._count("steps", 1)
        if self._delay_s:
            time.sleep(self._delay_s)
        self._count("steps", -1)
        return super().step(action)

    def close(self) -> None:
        self._count("episodes", -1)

    def _count(self, what: str, change: int) -> None:
        name = f"{self._split} {what}"
        with self._lock:
            self.now[name] += change
            self.most[name] = max(self.most[name], self.now[name])


class CutEnv(LettersEnv):
    """Letters, but the last turn is cut from outside instead of ending the episode."""

    def step(self, action: str) -> Step:
        observation, reward, is_over, _, info = super().step(action)
        return observation, reward, False, is_over, info


class SlowEnv:
    """Asynchronous: every call takes `delay_s`, and the episode `num_turns`."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {}

    def __init__(self, delay_s: float = 0.01, num_turns: int = 2) -> None:
        self._delay_s = delay_s
        self._num_turns = num_turns
        self._turn = 0

    async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(self._delay_s)
        self._turn = 0
        return "wait", {}

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._delay_s)
        self._turn += 1
        return "wait", 0.0, self._turn == self._num_turns, False, {}

    def render(self) -> None:
        return None

    def close(self) -> None:
        return None


class StuckEnv(LettersEnv):
    """Letters whose method `where` never comes back: it blocks, spins, or awaits what doesn't happen, here or in a thread."""

    def __init__(self, where: str = "step", how: Literal["block", "spin", "await", "thread"] = "block") -> None:
        super().__init__()
        self._where, self._how = where, how
        if where == "constructor":
            block_for_ever()

    def reset(self, *, seed: int | None = None) -> Any:
        return self._hang() if self._where == "reset" else super().reset(seed=seed)

    def step(self, action: str) -> Any:
        return self._hang() if self._where == "step" else super().step(action)

    def _hang(self) -> Any:
        if self._how == "block":
            block_for_ever()
        if self._how == "spin":
            spin_for_ever()
        return asyncio.to_thread(block_for_ever) if self._how == "thread" else await_for_ever()


LET_GO = Event()
"""Set, what is stuck comes back after all, so that a test leaves no thread behind."""


def block_for_ever() -> None:
    while not LET_GO.wait(0.5):
        pass


def spin_for_ever() -> None:
    while True:
        pass


async def await_for_ever() -> None:
    while not LET_GO.is_set():
        await asyncio.sleep(0.1)


class RaisingEnv(BanditEnv):
    """Raises RuntimeError in `step`."""

    def step(self, action: str) -> Step:
        raise RuntimeError("the toy is broken")


class NaNEnv(BanditEnv):
    """Returns NaN as the reward."""

    def step(self, action: str) -> Step:
        return "done", float("nan"), True, False, {}


class WrongTupleEnv(BanditEnv):
    """Returns the four values of gym's old `step`."""

    def step(self, action: str) -> Any:
        return "done", 1.0, True, {}
