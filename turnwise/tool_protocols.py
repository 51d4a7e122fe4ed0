"""The contracts of tools and of their calls: what a model may call, and how a call is read off its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from turnwise.types import Observation, Task


class ToolCall(NamedTuple):
    """One call in a response."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    """Joins the call with its result."""


class ParsedResponse(NamedTuple):
    """A response as its calls and the text around them."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    """One sentence for each call that can't be read. The model gets it as that call's result."""


class ToolCallParser(Protocol):
    """Reads the calls off a response, in the form of one family of models."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """`text` is the response as it was sampled, `tools` are the schemas that its context was opened with."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A function that a model may call. State is per trajectory: created once, asked for its reward, always released.

    A class that a tool file names is made as `Class(config, tool_schema)`: the mapping of the file, and its schema or None.
    """

    schema: Mapping[str, Any]
    """OpenAI's function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def create(self, task: Task) -> Any:
        """The state of one trajectory."""
        ...

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> str | Observation:
        """The result of one call, whose arguments the schema allows.

        Raises:
            ToolError: the model did something wrong; it reads the message. Any other exception fails the episode.
        """
        ...

    async def calc_reward(self, state: Any) -> float:
        """Added to the trajectory's reward at its end; 0 for a tool that gives none."""
        ...

    async def release(self, state: Any) -> None:
        """Frees what the state holds. It is called on every path, also if the episode fails or is cancelled."""
        ...
