"""Environments that show where they live, or end or hold up the process that they live in."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from toy_envs import LettersEnv

from turnwise.envs.base import Step
from turnwise.types import Media, Observation


class HomeEnv(LettersEnv):
    """Its expert names the process, and its key the steps so far."""

    def state_key(self) -> tuple[str, int]:
        return "turn", self._turn

    def expert_action(self) -> str:
        return str(os.getpid())


class PictureEnv(LettersEnv):
    """Shows pictures of 256 × 256."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        picture = np.full((256, 256, 3), (seed or 0) % 256, np.uint8)
        return Observation("look", (Media("image", picture),)), {}

    def render(self) -> str:
        return f"turn {self._turn}"


class AwaitedEnv(LettersEnv):
    """Its steps are coroutines, all on one event loop."""

    loop: asyncio.AbstractEventLoop | None = None

    async def reset(self, *, seed: int | None = None) -> Any:
        self.loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0)
        return super().step(action)


class EndingEnv(LettersEnv):
    """Ends its process at an answer, by a signal; with `once`, only if that file doesn't exist yet."""

    def __init__(self, once: str | None = None, num_turns: int = 2) -> None:
        super().__init__(num_turns)
        self._once = once

    def step(self, action: str) -> Step:
        if self._once is None or not Path(self._once).exists():
            if self._once is not None:
                Path(self._once).touch()
            os.abort()  # a signal by `os.kill` may come after the answer
        return super().step(action)


class StuckInCEnv(LettersEnv):
    """Its step waits in C code, where nothing interrupts it."""

    def step(self, action: str) -> Step:
        threading.Event().wait()
        return super().step(action)


class RaisingStepEnv(LettersEnv):
    """Its step raises an error of its own class, or tries to end the process."""

    def __init__(self, exits: bool = False) -> None:
        super().__init__()
        self._exits = exits

    def step(self, action: str) -> Step:
        if self._exits:
            raise SystemExit(3)
        raise ValueError(f"no step for {action}")


class LooseEnv(LettersEnv):
    """Its info holds what can't be sent."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        observation, _ = super().reset(seed=seed)
        return observation, {"lock": threading.Lock()}
