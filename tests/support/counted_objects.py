"""A tool, a reward and an environment that count how often they are made, for tests of what a run reads and
makes once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from toy_envs import LettersEnv
from toy_tools import Notebook

MADE: Counter[str] = Counter()


class CountedTool(Notebook):
    """Counts its objects and its episodes."""

    def __init__(self, *arguments: Any) -> None:
        MADE["tool"] += 1
        super().__init__(*arguments)

    async def create(self, task: Any) -> list[str]:
        MADE["tool's episodes"] += 1
        return await super().create(task)


class CountedReward:
    """Counts its objects."""

    def __init__(self) -> None:
        MADE["reward"] += 1

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]


class CountedEnv(LettersEnv):
    """Counts its objects and its episodes."""

    def __init__(self, num_turns: int = 2) -> None:
        MADE["env"] += 1
        super().__init__(num_turns)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        MADE["env's episodes"] += 1
        return super().reset(seed=seed)
