"""Rewards and an agent of rows for tests; some go wrong on purpose."""

from __future__ import annotations

import time
from typing import Any

from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgentLimits
from turnwise.data.prompts import prompt_of
from turnwise.protocols import OpenConversation, RewardResult
from turnwise.tools.tool_box import Interactions, ToolBox
from turnwise.types import AS_OPENED, CallOptions, Group, SamplingParams, Task, Trajectory, derive_seed


def length(completions: list[str], power: float = 1.0) -> list[float]:
    return [len(text) ** power / 10 for text in completions]


async def length_later(completions: list[str]) -> list[float]:
    return [len(text) / 10 for text in completions]


def slow(completions: list[str]) -> list[float]:
    time.sleep(0.05)
    return [float(len(text)) for text in completions]


def raising(completions: list[str], prompts: list[str]) -> list[float]:
    raise ValueError("no such judge")


def too_few(completions: list[str]) -> list[float]:
    return [0.0]


def not_finite(completions: list[str]) -> list[float]:
    return [float("nan")] * len(completions)


def leaving(completions: list[str]) -> list[float]:
    raise SystemExit(3)


def of_answer(completions: list[str], ground_truth: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, ground_truth, strict=True)]


def half_from_four_on(completions: list[str], prompt: list[str]) -> list[float]:
    """Every second sibling succeeds, and all do whose prompt is one, two or three."""
    return [float(number % 2 == 0 or word in ("one", "two", "three")) for number, word in enumerate(prompt)]


class Longest:
    """The longest response of the group wins; each turn that was said earns a little."""

    def __init__(self, bonus: float = 0.5) -> None:
        self.bonus = bonus

    async def __call__(self, group: Group) -> RewardResult:
        lengths = [len(t.turns[-1].text) for t in group.trajectories]
        return RewardResult([float(n == max(lengths)) for n in lengths], [[self.bonus] for _ in lengths])


class AskTwice:
    """Says the prompt a second time after the first response: an agent of rows."""

    options = (AS_OPENED, AS_OPENED)

    def __init__(self, settings: RowAgentSettings) -> None:
        self._settings = settings

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        conversation = open_conversation(sampling)
        messages: Any = prompt_of(task.payload, self._settings.prompt_key)
        for number, options in enumerate(self.options):
            await conversation.generate(messages[-1:] if number else messages, options)
        return [Trajectory(task=task, sibling=sibling, turns=conversation.turns)]


class AlternatesTemperatures(AskTwice):
    """Takes four turns, every other one at temperature 1.3."""

    options = (AS_OPENED, CallOptions(temperature=1.3)) * 2


class TellsTools:
    """Asks for the number that its tools, users and limits hash to."""

    def __init__(
        self,
        settings: RowAgentSettings,
        tools: ToolBox,
        limits: ToolAgentLimits,
        interactions: Interactions,
        extra: str = "",
    ) -> None:
        self.number = (
            derive_seed(
                repr((settings, tools.names, tools.timeout_s, limits, [*interactions.by_name])), extra
            )
            % 1000
        )

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        conversation = open_conversation(sampling)
        await conversation.generate([{"role": "user", "content": str(self.number)}])
        return [Trajectory(task=task, sibling=sibling, turns=conversation.turns)]


def failing_on_nine(completions: list[str], answer: list[str]) -> list[float]:
    if answer[0] == "nine":
        raise ValueError("nine is no answer")
    return [1.0] * len(completions)


def failing_in_validation(completions: list[str], answer: list[str]) -> list[float]:
    if answer[0] not in "eight nine ten":
        return [1.0] * len(completions)
    raise ValueError("the judge is away")
