"""The published tool and the published simulated user of GSM8K: the model gives an answer and is told whether it is right."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.rewards import gsm8k_score
from turnwise.errors import EnvironmentFault
from turnwise.types import Message, Task

SCHEMA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The published schema."""
UNIMPROVED = -0.05
"""Reward of a submission that is no better than the one before."""


@dataclass(slots=True)
class Submissions:
    """The state of a trajectory: its right answer, its best score so far and its reward."""

    ground_truth: str
    best: float = 0.0
    reward: float = 0.0


class Gsm8kTool:
    """Scores submitted answers against the row's `extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`. Its
    reward is a penalty for submissions that improve nothing; `data.reward` scores the final answer."""

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


@dataclass(slots=True)
class Answered:
    """The model's last answer in a conversation, and the right one."""

    ground_truth: str
    text: str = ""


class Gsm8kInteraction:
    """A user who asks again if an answer doesn't match the row's `extra_info.interaction_kwargs.ground_truth`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    async def start_interaction(self, instance_id: str, ground_truth: Any = None, **kwargs: Any) -> Answered:
        if ground_truth is None:
            raise EnvironmentFault(f"{instance_id}: it needs the column extra_info.interaction_kwargs.ground_truth")
        return Answered(str(ground_truth))

    async def generate_response(
        self, state: Answered, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        state.text = str(messages[-1]["content"])
        score = await self.calculate_score(state)
        if score == 1:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", score, {}

    async def calculate_score(self, state: Answered) -> float:
        return gsm8k_score(state.text, state.ground_truth)

    async def finalize_interaction(self, state: Answered) -> None: ...
