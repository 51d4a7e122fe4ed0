"""Tools for tests; some go wrong on purpose."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from datetime import date
from typing import Any

from turnwise.errors import ToolError
from turnwise.tools import jail
from turnwise.tools.tool_box import ToolBox, ToolResult, ToolSession
from turnwise.types import Observation, Task

LACKS_SANDBOX = "TURNWISE_NEEDS_SANDBOX" not in os.environ and jail.landlock_version() < jail.MIN_LANDLOCK
"""Whether tests of the sandbox are skipped. CI needs one: there a refusal is a failed test."""

TOOL_CHATML = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n"
    "{% endif %}"
)
"""A chat template in ChatML's form that shows the schemas of tools."""


def schema(name: str) -> dict[str, Any]:
    """A tool of one text."""
    properties = {"text": {"type": "string", "description": "A text."}}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    return {"type": "function", "function": {"name": name, "description": "A toy.", "parameters": parameters}}


TASK = Task(id="train/data/0", tag="data", split="train", seed=0)


def called(box: ToolBox, name: str, /, **arguments: Any) -> tuple[ToolResult, ToolSession]:
    """The result of one call in an episode, without the time that it waited, and the episode's tools."""

    async def main() -> tuple[ToolResult, ToolSession]:
        async with box.open(TASK) as session:
            result = await session.call(name, arguments)
            return result._replace(waited_s=0.0), session

    return asyncio.run(main())


class Notebook:
    """Notes texts of one trajectory, and rewards each of them. `num_open` counts the states that aren't
    released."""

    has_hung = False

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None
    ) -> None:
        self.schema = tool_schema or schema("note")
        self.reward = (config or {}).get("reward", 0.25)
        self.num_open = 0

    async def create(self, task: Task) -> list[str]:
        self.num_open += 1
        return []

    async def execute(self, state: list[str], arguments: Mapping[str, Any]) -> str | Observation:
        text = arguments["text"]
        match text:
            case "hang":
                await asyncio.sleep(5)
                self.has_hung = True
            case "raise":
                raise RuntimeError("the service is down")
            case "mistake":
                raise ToolError("no such page")
            case "exit":
                sys.exit(3)
            case "bytes":
                return b"\xff"  # type: ignore[return-value]
            case "large":
                return "x" * 10_000_000
            case "half":
                return "a\ud800"
        await asyncio.sleep(0)
        state.append(text)
        return ", ".join(state)

    async def calc_reward(self, state: list[str]) -> float:
        return self.reward * len(state)

    async def release(self, state: list[str]) -> None:
        self.num_open -= 1


def divide(a: float, b: float) -> float:
    """Divides two numbers.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b


async def greet(name: str, times: int = 1) -> dict[str, Any]:
    """Greets somebody.

    Args:
        name: Whom to greet.
        times: How often.
    """
    return {"said": [f"Hello {name}"] * times}


def leaving(code: int) -> str:
    """Ends the interpreter.

    Args:
        code: Its status.
    """
    sys.exit(code)


def blocking(path: str) -> str:
    """Reads a pipe.

    Args:
        path: The pipe, which nobody writes.
    """
    with os.fdopen(os.open(path, os.O_RDWR)) as pipe:
        return pipe.readline()


class Undated(Notebook):
    """Its schema holds a date, as YAML reads 2020-01-01."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(config)
        self.schema = schema("undated")
        self.schema["function"]["parameters"]["properties"]["text"]["default"] = date(2020, 1, 1)
