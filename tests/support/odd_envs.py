"""Environments that are slow, blocking, cut or wrong in one way each, and an agent of a few lines."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Event, Lock
from typing import Any, ClassVar, Literal

from toy_envs import BanditEnv, LettersEnv

from turnwise.envs.base import Step
from turnwise.envs.contract import read_reset, read_step
from turnwise.protocols import Env, OpenConversation
from turnwise.types import Reduction, SamplingParams, Task, Trajectory


class HesitantEnv(LettersEnv):
    """Letters whose answers take up to 20 ms of waiting, a new time for each."""

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(random.SystemRandom().random() * 0.02)
        return super().step(action)


class CrowdEnv(LettersEnv):
    """Letters whose steps may block for `delay_s`. Counts its episodes and its steps at the same time, by
    split."""

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
    """Letters whose method `where` never comes back: it blocks, spins, or awaits what doesn't happen, here or
    in a thread."""

    def __init__(
        self, where: str = "step", how: Literal["block", "spin", "await", "thread"] = "block"
    ) -> None:
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
"""Lets every stuck call come back when it is set, so that a test leaves no thread behind."""


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


class FixedEnv(BanditEnv):
    """Answers each action with the same result, whatever that is."""

    def __init__(self, *result: Any) -> None:
        super().__init__()
        self._result = result

    def step(self, action: str) -> Any:
        return self._result


class NaNEnv(BanditEnv):
    """Returns NaN as the reward."""

    def step(self, action: str) -> Step:
        return "done", float("nan"), True, False, {}


class WrongTupleEnv(BanditEnv):
    """Returns the four values of gym's old `step`."""

    def step(self, action: str) -> Any:
        return "done", 1.0, True, {}


class OneTurnAgent:
    """Shows the first observation, takes the whole answer as the action, and stops: an `AgentLoop`."""

    def __init__(self, make_env: Callable[[Task], Env], settings: Any) -> None:
        self._make_env = make_env

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        env, conversation = self._make_env(task), open_conversation(sampling)
        observation, _ = read_reset(env.reset(seed=task.seed), task.tag)
        reply = await conversation.generate([{"role": "user", "content": observation.text}])
        if reply is not None:
            step = read_step(env.step(str(reply["content"])), task.tag, 1, env.metric_reductions)
            turn = conversation.turns[-1]
            turn.observation, turn.action, turn.reward = observation.text, str(reply["content"]), step.reward
        return [Trajectory(task=task, sibling=sibling, turns=conversation.turns, status="finished")]
