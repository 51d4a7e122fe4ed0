"""verl's tool and simulated user for GSM8K: the model submits an answer and is told whether it is right."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.answers import gsm8k_score
from turnwise.errors import EnvironmentFault
from turnwise.types import Message, Task

_SCHEMA_FILE = Path(__file__).with_suffix(".json")
SCHEMA: Mapping[str, Any] = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))
"""The tool's schema, as verl publishes it."""
UNIMPROVED = -0.05
"""Reward of a submission whose score isn't higher than that of the submission before, or than 0 for the first
one."""


@dataclass(slots=True)
class Submissions:
    """The state of a trajectory: the right answer, the score of the last submission, and the reward so
    far."""

    ground_truth: str
    last_score: float = 0.0
    reward: float = 0.0


class Gsm8kTool:
    """Scores submitted answers against the row's
    `extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`. The tool's reward is the sum of
    `UNIMPROVED` over submissions without improvement; `data.reward` scores the final answer."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None) -> None:
        self.schema = tool_schema or SCHEMA

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Raises EnvironmentFault if the row has no right answer."""
        self._truth(columns)

    async def create(self, task: Task) -> Submissions:
        return Submissions(str(self._truth(task.payload)))

    def _truth(self, columns: Mapping[str, Any]) -> Any:
        name = self.schema["function"]["name"]
        truth: Any = columns
        for key in ("extra_info", "tools_kwargs", name, "create_kwargs", "ground_truth"):
            # Tables hold null for what is missing.
            truth = (truth or {}).get(key)
        if truth is None:
            raise EnvironmentFault(
                f"it needs the column extra_info.tools_kwargs.{name}.create_kwargs.ground_truth"
            )
        return truth

    async def execute(self, state: Submissions, arguments: Mapping[str, Any]) -> str:
        answer = arguments["answer"].removeprefix("#### ")
        score = gsm8k_score(f"#### {answer}", state.ground_truth)
        if score <= state.last_score:
            state.reward += UNIMPROVED
        state.last_score = score
        return f"Current parsed {answer=} reward={score}"

    async def calc_reward(self, state: Submissions) -> float:
        return state.reward

    async def release(self, state: Submissions) -> None: ...


@dataclass(slots=True)
class Answered:
    """The right answer, and the text of the model's last answer."""

    ground_truth: str
    text: str = ""


class Gsm8kInteraction:
    """A user who asks again if an answer doesn't match the row's
    `extra_info.interaction_kwargs.ground_truth`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    async def start_interaction(self, instance_id: str, ground_truth: Any, **kwargs: Any) -> Answered:
        return Answered(str(ground_truth))

    async def generate_response(
        self, state: Answered, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        state.text = str(messages[-1]["content"])
        score = await self.calculate_score(state)
        if score == 1:
            return True, "Your response is correct!", score, {}
        text = "Your response is incorrect! You need to reflect on your answer and try again."
        return False, text, score, {}

    async def calculate_score(self, state: Answered) -> float:
        return gsm8k_score(state.text, state.ground_truth)

    async def finalize_interaction(self, state: Answered) -> None: ...
