"""Simulated users for tests; some go wrong on purpose."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.types import Message

RIGHT = (True, "thanks", 1.0, {"mood": 1.0, "why": "no number"})


class Asker:
    """Asks on until the model has answered `num_questions` times, and gives a quarter for each answer. From
    the answer number `after` on, what it does in a method is the config's or the row's entry of that name, if
    there is one. `num_open` counts the states that aren't released."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.num_open = 0
        self.heard: list[list[Message]] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> dict[str, Any]:
        state = {"id": instance_id, "num_answers": 0, "does": self.config | kwargs}
        await self._misbehave(state, "start")
        self.num_open += 1
        return state

    async def generate_response(
        self, state: Any, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, Mapping[str, Any]]:
        self.heard.append(list(messages))
        if (odd := await self._misbehave(state, "reply")) is not None:
            return odd
        state["num_answers"] += 1
        if state["num_answers"] > state["does"].get("num_questions", 2):
            return RIGHT
        return False, f"and question {state['num_answers']}?", 0.25, {}

    async def calculate_score(self, state: Any) -> float:
        odd = await self._misbehave(state, "score")
        return 0.5 if odd is None else odd

    async def finalize_interaction(self, state: Any) -> None:
        self.num_open -= 1
        await self._misbehave(state, "end")

    async def _misbehave(self, state: Any, method: str) -> Any:
        what = state["does"].get(method) if state["num_answers"] >= state["does"].get("after", 0) else None
        match what:
            case "hang":
                await asyncio.sleep(5)
            case "raise":
                raise RuntimeError("the service is down")
            case "refuse":
                raise ConfigError("no such service")
            case "exit":
                sys.exit(3)
            case _:
                return what


class Plain:
    """A class in the published form: state by id, and nothing returned at the start."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name, self.states = config["name"], {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self.states[instance_id] = kwargs

    def generate_response(
        self, instance_id: str, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, None, None]:
        return len(messages) > 2, f"{self.name} says {self.states[instance_id]['word']}", None, None

    async def calculate_score(self, instance_id: str) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str) -> None:
        del self.states[instance_id]


class Mute:
    """Has no method of a user."""

    def __init__(self, config: Mapping[str, Any]) -> None: ...
