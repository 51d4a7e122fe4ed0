"""The contracts of what answers a model: tools, how their calls are read off its text, and simulated users."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from turnwise.types import Message, Observation, Task


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

    A class that a tool file names is made as `Class(config, tool_schema)`: the mapping of the file, and its schema or None."""

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


@runtime_checkable
class Interaction(Protocol):
    """A simulated user, who may reply to the final answer of each of the model's turns. One object serves all conversations.

    A class that an interaction file names is made as `Class(config)`: the mapping of the file, and its `name`. The keyword
    arguments of a conversation are those of its row, `extra_info.interaction_kwargs`."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        """The state of one conversation, which the other methods get; None stands for the id itself."""
        ...

    async def generate_response(
        self, state: Any, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, Mapping[str, Any]]:
        """`(should_terminate, text, score, metadata)` for the whole conversation so far, whose last message is the model's.

        The text is the next message of the user, unless the conversation ends here. The score is the reward of the model's
        turn, and the metadata's numbers are its metrics."""
        ...

    async def calculate_score(self, state: Any) -> float:
        """The score of the conversation as it stands, which is reported and no reward."""
        ...

    async def finalize_interaction(self, state: Any) -> None:
        """Frees what the state holds. It is called on every path, also if the episode fails or is cancelled."""
        ...
