"""The published tool `calc_gsm8k_reward`: the model submits an answer and is told whether it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.data.reward_functions import gsm8k_score
from turnwise.errors import EnvironmentFault
from turnwise.types import Task

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if parsed answer is "
        "incorrect or not correctly parsed)",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {
                    "type": "string",
                    "description": "The model's answer to the GSM8K math problem, must be a digits",
                }
            },
            "required": ["answer"],
        },
    },
}
UNIMPROVED = -0.05
"""Reward of a submission that is no better than the one before."""


@dataclass(slots=True)
class Submissions:
    """What a trajectory has submitted."""

    ground_truth: str
    best: float = 0.0
    reward: float = 0.0


class Gsm8kTool:
    """Scores submitted answers against the row's `extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`. The
    trajectory's reward gets the penalties for submissions that improve nothing; the answer itself is what `data.reward` scores.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None) -> None:
        self.schema = tool_schema or SCHEMA

    async def create(self, task: Task) -> Submissions:
        name = self.schema["function"]["name"]
        ground_truth = create_kwargs(task, name).get("ground_truth")
        if ground_truth is None:
            raise EnvironmentFault(
                f"{task.id}: the tool {name} needs the column extra_info.tools_kwargs.{name}.create_kwargs.ground_truth"
            )
        return Submissions(str(ground_truth))

    async def execute(self, state: Submissions, arguments: Mapping[str, Any]) -> str:
        answer = arguments["answer"].removeprefix("#### ")
        score = gsm8k_score(f"#### {answer}", state.ground_truth)
        if score <= state.best:
            state.reward += UNIMPROVED
        state.best = score
        return f"Current parsed {answer=} reward={score}"

    async def calc_reward(self, state: Submissions) -> float:
        return state.reward

    async def release(self, state: Submissions) -> None: ...


def create_kwargs(task: Task, name: str) -> Mapping[str, Any]:
    """The row's `create_kwargs` of a tool, in the published schema; empty if it has none."""
    kwargs = (task.payload.get("extra_info") or {}).get("tools_kwargs") or {}
    return (kwargs.get(name) or {}).get("create_kwargs") or {}
