"""The contracts of tools, of parsers that read their calls from a model's text, and of simulated users."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from turnwise.types import Message, Observation, Task


class ToolCall(NamedTuple):
    """One call in a response."""

    name: str
    arguments: Mapping[str, Any]
    id: str
    """Links the call to its result."""


class ParsedResponse(NamedTuple):
    """The calls of a response, and the text around them."""

    content: str
    """The text before, between and after the calls. Thinking and calls that can't be read are part of it."""
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    """One sentence for each call that can't be read. The model gets it as that call's result."""


@runtime_checkable
class ToolCallParser(Protocol):
    """Reads the tool calls from a response, in the format of one family of models."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """Parses `text`, the response as it was sampled, without the tokens that begin or end a turn
        (`ReadsTurnTokens`). `tools` are the schemas of the tools that the context offers."""


@runtime_checkable
class ReadsTurnTokens(Protocol):
    """A parser of a family of models whose tokens that begin or end turns also mark calls."""

    reads_turn_tokens: bool
    """Whether the parser gets the response with these tokens, except a final stop token."""


@runtime_checkable
class Tool(Protocol):
    """A function that a model may call. Each trajectory has its own state of the tool: `create` makes it,
    `calc_reward` scores it, `release` always frees it. A class in a tool file is called with two of the
    file's entries, `(config, tool_schema)`."""

    schema: Mapping[str, Any]
    """OpenAI's function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def create(self, task: Task) -> Any:
        """Creates the state of one trajectory."""

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> str | Observation:
        """The result of one call, with `arguments` that fit the schema. Raises ToolError if the model made a
        mistake; the model reads the message. Any other exception fails the episode."""

    async def calc_reward(self, state: Any) -> float:
        """The reward that the tool adds to the trajectory's score when the trajectory ends; 0 for a tool
        without a reward."""

    async def release(self, state: Any) -> None:
        """Frees what the state holds. It is called on every path, even if the episode fails or is
        cancelled."""


@runtime_checkable
class ChecksRows(Protocol):
    """A tool or a reward that checks each row of the data set, beyond whether the row has a column for each
    parameter."""

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Raises an exception that says what the row lacks. A run calls this for every row before it loads a
        model. A tool gets all columns; a reward gets those that its parameters name, and the `args` of its
        entry in the config."""


@runtime_checkable
class Interaction(Protocol):
    """A simulated user, who may reply to the model's final answer of each turn. One object serves all
    conversations. A class that an interaction file names is called as `Class(config)`, with the entry's
    `config` plus its `name`. The keyword arguments of a conversation are `extra_info.interaction_kwargs` of
    its row."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        """Starts a conversation and returns its state for the other methods. If it returns None, the id is
        the state."""

    async def generate_response(
        self, state: Any, messages: Sequence[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, Mapping[str, Any]]:
        """`(should_terminate, text, score, metadata)` for the whole conversation so far, which ends with the
        model's message. The text is the user's next message, unless the conversation ends here. The score is
        the reward of the model's turn, and the numbers in the metadata are its metrics."""

    async def calculate_score(self, state: Any) -> float:
        """The score of the conversation so far. It is reported, but isn't a reward."""

    async def finalize_interaction(self, state: Any) -> None:
        """Frees what the state holds. It is called on every path, even if the episode fails or is
        cancelled."""
