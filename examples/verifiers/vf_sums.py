"""A taskset of verifiers: sums of two numbers below 100, digit by digit, as in examples/arithmetic."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 for the right sum, else 0."""
        said = trace.assistant_messages[-1].content
        return float(str(said).split() == self.data.answer.split())


class SumsTaskset(vf.Taskset[SumTask]):
    """All 10,000 sums, in an order of their own."""

    def load(self) -> Iterator[SumTask]:
        pairs = [(a, b) for a in range(100) for b in range(100)]
        random.Random(0).shuffle(pairs)
        for a, b in pairs:
            prompt = f"{_apart(a)} + {_apart(b)} ="
            yield SumTask(SumData(prompt=prompt, answer=_apart(a + b)), self.config.task)


def _apart(number: int) -> str:
    return " ".join(str(number))
