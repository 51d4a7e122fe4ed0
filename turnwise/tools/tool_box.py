"""The tools and the simulated user of one episode: their states, calls with deadlines, and whose fault an
error is."""

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from turnwise.errors import ConfigError, EnvironmentFault, ToolError, TurnwiseError, nearest
from turnwise.protocols import Interaction, Tool
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.tools.argument_schema import ArgumentSchema
from turnwise.tools.first_calls import FirstCalls
from turnwise.types import Limit, Message, Observation, Task, Turn

logger = logging.getLogger(__name__)

TRACK = "tools"
"""Name of the stopwatch's track for calls of tools and simulated users."""
MISTAKES = (ToolError, ValueError, ArithmeticError)
"""Exceptions of a tool that count as mistakes of the model. Any other exception fails the episode."""


class ToolFault(EnvironmentFault):
    """A tool or simulated user ran past its deadline, or broke its contract. The model isn't to blame: the
    episode fails."""


class ToolResult(NamedTuple):
    """The answer to one call."""

    text: str
    is_error: bool = False
    """Whether the model made a mistake."""


@dataclass(slots=True)
class OfferedTool:
    """A tool with the limits of its calls, for all episodes of an agent. Raises ConfigError if the tool's
    schema is invalid."""

    tool: Tool
    timeout_s: float | None = None
    """Maximum seconds of one call; None = `ToolBox.timeout_s`."""
    max_concurrency: int | None = None
    """Maximum calls of `execute` at the same time; None = any number."""
    name: str = field(init=False)
    places: AbstractAsyncContextManager[Any] = field(init=False, default_factory=nullcontext)
    """A call enters this first, and waits there until fewer than `max_concurrency` calls run."""
    first_calls: FirstCalls = field(init=False)
    _arguments: ArgumentSchema = field(init=False)

    def __post_init__(self) -> None:
        function = self.tool.schema.get("function")
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            form = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
            raise ConfigError(
                f"the schema of {type(self.tool).__name__} has no function with a name; a tool's schema is "
                f"{form}"
            )
        self.name = function["name"]
        self.first_calls = FirstCalls(self.name)
        try:
            json.dumps(self.tool.schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as fault:
            what = f"the schema of the tool {self.name} isn't JSON"
            raise ConfigError(f"{what}: {fault}; write it as JSON can (a date as a text)") from fault
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        self._arguments = ArgumentSchema(self.name, parameters)
        if self.max_concurrency:
            self.places = asyncio.Semaphore(self.max_concurrency)

    def problem_of(self, arguments: Any) -> str:
        """Why the schema refuses the arguments; "" if it allows them."""
        return self._arguments.problem_of(arguments)


@dataclass(frozen=True, slots=True)
class ToolBox:
    """The tools that episodes may use. `open` selects those of one episode. Raises ConfigError if two have
    the same name."""

    tools: Sequence[OfferedTool]
    timeout_s: float | None = None
    watchdog: Watchdog = field(default_factory=Watchdog)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        names = self.names
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"two tools are called {', '.join(sorted(doubled))}; a call names one tool, so rename one "
                f"of them"
            )

    @property
    def names(self) -> list[str]:
        return [offered.name for offered in self.tools]

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [offered.tool.schema for offered in self.tools]

    def select(self, columns: Mapping[str, Any]) -> list[OfferedTool]:
        """All tools, or only those that the row's `extra_info.tool_selection` names."""
        selection = (columns.get("extra_info") or {}).get("tool_selection")
        return [offered for offered in self.tools if not selection or offered.name in selection]

    def watched(self, watchdog: Watchdog, stopwatch: Stopwatch) -> "ToolBox":
        """The same tools, whose calls are watched and timed by these."""
        return replace(self, watchdog=watchdog, stopwatch=stopwatch)

    def open(self, task: Task) -> "ToolSession":
        """The selected tools of one episode."""
        return ToolSession(self, self.select(task.payload), task)


class ToolSession:
    """The tools of one episode. Their states are created on entering, and always released on leaving.
    `metrics` has the `calls`, `errors` and `seconds` of each tool, and `unknown_tools`, the number of calls
    of tools that don't exist."""

    def __init__(self, box: ToolBox, tools: Sequence[OfferedTool], task: Task) -> None:
        self._box, self._task = box, task
        self._tools = {offered.name: offered for offered in tools}
        self._states: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        counted = (f"tool/{name}/{what}" for name in self._tools for what in ("calls", "errors", "seconds"))
        self.metrics = dict.fromkeys(["unknown_tools", *counted], 0.0)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [offered.tool.schema for offered in self._tools.values()]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for name, offered in self._tools.items():
                state = await self._answer(offered, "create", self._task)
                self._states[name] = state
                stack.push_async_callback(partial(self._answer, offered, "release", state))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._stack.__aexit__(*exception)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The answer to a call of the model. A mistake (an unknown tool, wrong arguments, `MISTAKES` of the
        tool) is answered by a sentence for the model. Raises ToolFault if the tool takes too long or doesn't
        return a text, and passes on other exceptions of the tool."""
        offered = self._tools.get(name)
        if offered is None:
            self.metrics["unknown_tools"] += 1
            return _undecoded(
                f"Unknown function {name!r}. Available tools: {', '.join(self._tools) or 'none'}"
            )
        self.metrics[f"tool/{name}/calls"] += 1
        started = self._box.stopwatch.now()
        try:
            result = await self._executed(offered, arguments)
        finally:
            self._box.stopwatch.add(TRACK, name, started)
            self.metrics[f"tool/{name}/seconds"] += self._box.stopwatch.now() - started
        self.metrics[f"tool/{name}/errors"] += result.is_error
        return result

    async def rewards(self) -> dict[str, float]:
        """Name → reward of each tool whose reward for this episode isn't 0. Raises ToolFault unless all are
        finite numbers."""
        found: dict[str, float] = {}
        for name, offered in self._tools.items():
            found[name] = finite(
                await self._answer(offered, "calc_reward", self._states[name]), f"{name}.calc_reward"
            )
        return {name: reward for name, reward in found.items() if reward}

    async def _executed(self, offered: OfferedTool, arguments: Mapping[str, Any]) -> ToolResult:
        if problem := offered.problem_of(arguments):
            return _undecoded(f"Invalid arguments for {offered.name!r}: {problem}")
        try:
            async with offered.places:
                result = await self._answer(offered, "execute", self._states[offered.name], arguments)
        except MISTAKES as mistake:
            offered.first_calls.raised(mistake)
            problem = str(mistake) or type(mistake).__name__
            return ToolResult(readable(f"Error executing {offered.name!r}: {problem}"), is_error=True)
        offered.first_calls.returned()
        text = result.text if isinstance(result, Observation) else result
        if not isinstance(text, str) or (isinstance(result, Observation) and result.media):
            what = "pictures" if isinstance(text, str) else f"a {type(text).__name__}"
            raise ToolFault(f"the tool {offered.name} returned {what}; a tool returns a string")
        return ToolResult(readable(text))

    async def _answer(self, offered: OfferedTool, method: str, *arguments: Any) -> Any:
        what, own = f"{offered.name}.{method}", offered.timeout_s
        timeout_s, setting = (
            (self._box.timeout_s, "agent.tool_timeout_s") if own is None else (own, "timeout_s of the tool")
        )
        limit = self._box.watchdog.waiting(
            f"an episode of {self._task.tag}", what, timeout_s, setting, ToolFault
        )
        with Foreign(what, self._task.id):
            async with limit:
                result = getattr(offered.tool, method)(*arguments)
                return await result if inspect.isawaitable(result) else result


def _undecoded(text: str) -> ToolResult:
    logger.info("Failed to decode tool call: %s", text)
    return ToolResult(text, is_error=True)


def finite(number: Any, what: str) -> float:
    """The number that `what` returned, as a float. Raises ToolFault if it isn't a finite number."""
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not abs(number) <= sys.float_info.max
    ):
        raise ToolFault(f"{what} returned {number!r:.80}; it must be one finite number")
    return float(number)


def readable(text: str) -> str:
    """The text with `?` in place of lone surrogates, which no tokenizer accepts."""
    return text.encode(errors="replace").decode()


_ANSWER = "an interaction answers (should_terminate, text, score, metadata)"


def interaction_kwargs(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `extra_info.interaction_kwargs` without nulls, which tables hold for missing values; {} if
    the row has none."""
    extra = columns.get("extra_info")
    kwargs = extra.get("interaction_kwargs") if isinstance(extra, Mapping) else None
    return (
        {key: value for key, value in kwargs.items() if value is not None}
        if isinstance(kwargs, Mapping)
        else {}
    )


@dataclass(frozen=True, slots=True)
class Interactions:
    """The simulated users that rows may name."""

    by_name: Mapping[str, Interaction] = field(default_factory=dict)
    timeout_s: float | None = None
    """Maximum seconds of one call; None = no limit."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def watched(self, watchdog: Watchdog, stopwatch: Stopwatch) -> "Interactions":
        """The same users, whose calls are watched and timed by these."""
        return replace(self, watchdog=watchdog, stopwatch=stopwatch)

    def open(self, task: Task, sibling: int, max_turns: int | None = None) -> "InteractionSession":
        """A session with the simulated user that the task's row names, or with nobody if it names none. The
        user sends at most `max_turns` messages (None = any number). Raises ToolFault if the name is
        unknown."""
        kwargs = interaction_kwargs(task.payload)
        name = str(kwargs.get("name", ""))
        if name and name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ToolFault(
                f"{task.id}: there is no interaction {name!r}; known are "
                f"{known}.{nearest(name, self.by_name)}"
            )
        return InteractionSession(self, name, kwargs, task, sibling, max_turns)


class InteractionSession:
    """The simulated user of one conversation, if any (`is_there`). Entering makes the user's state, and
    leaving releases it."""

    limit: Limit | None = None
    """`max_steps` if the user wanted to go on and had sent `max_turns` messages, else None."""
    num_turns = 0
    """Number of messages that the user has sent."""

    def __init__(
        self,
        box: Interactions,
        name: str,
        kwargs: Mapping[str, Any],
        task: Task,
        sibling: int,
        max_turns: int | None,
    ) -> None:
        self._box, self._name, self._kwargs = box, name, kwargs
        self._task, self._id, self._max_turns = task, f"{task.id}/{sibling}", max_turns
        self._state: Any = None

    @property
    def is_there(self) -> bool:
        return bool(self._name)

    async def __aenter__(self) -> Self:
        if self.is_there:
            state = await self._ask("start_interaction", self._id, **self._kwargs)
            self._state = self._id if state is None else state
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_there:
            return
        try:
            await self._ask("finalize_interaction", self._state)
        except EnvironmentFault as later:
            if fault is None:
                raise
            # The episode ends with the first error.
            logger.warning("%s: %s", self._id, later)

    async def reply(self, messages: Sequence[Message], turn: Turn) -> list[Message]:
        """The user's next message after the model's answer in `turn`, as a list. The list is empty if there
        is no user, if the user ends the conversation, or if the user had already sent `max_turns` messages
        (this sets `limit`). Adds the user's score to the turn's reward, and the numbers in the user's
        metadata to the turn's metrics. Raises ToolFault if the user takes too long or answers in a wrong
        form; EnvironmentFault if the user raises an exception."""
        if not self.is_there:
            return []
        said = await self._ask("generate_response", self._state, list(messages), **self._kwargs)
        what = f"the interaction {self._name}"
        if not isinstance(said, tuple | list) or len(said) != 4:
            raise ToolFault(f"{what} answered {said!r:.80}; {_ANSWER}")
        is_over, text, score, metadata = said
        if not isinstance(text, str):
            raise ToolFault(f"{what} answered a {type(text).__name__} as its text; {_ANSWER}")
        turn.reward += 0.0 if score is None else finite(score, f"{what}.generate_response (score)")
        numbers = metadata.items() if isinstance(metadata, Mapping) else ()
        known = (
            (key, value)
            for key, value in numbers
            if isinstance(value, int | float) and abs(value) <= sys.float_info.max
        )
        turn.metrics |= {f"interaction/{key}": float(value) for key, value in known}
        if is_over:
            return []
        if self.num_turns == self._max_turns:
            self.limit = "max_steps"
            return []
        self.num_turns += 1
        return [{"role": "user", "content": readable(text)}]

    async def metrics(self) -> dict[str, float]:
        """The number of the user's messages and the score of the whole conversation; {} if there is no
        user."""
        if not self.is_there:
            return {}
        score = finite(
            await self._ask("calculate_score", self._state), f"the interaction {self._name}.calculate_score"
        )
        return {"user_turns": float(self.num_turns), f"interaction/{self._name}/score": score}

    async def _ask(self, method: str, /, *arguments: Any, **kwargs: Any) -> Any:
        box, what = self._box, f"the interaction {self._name}.{method}"
        waiter = f"an episode of {self._task.tag}"
        limit = box.watchdog.waiting(waiter, what, box.timeout_s, "agent.tool_timeout_s", ToolFault)
        started = box.stopwatch.now()
        try:
            with Foreign(what, self._task.id, are_faults=True):
                async with limit:
                    try:
                        result = getattr(box.by_name[self._name], method)(*arguments, **kwargs)
                        return await result if inspect.isawaitable(result) else result
                    except TurnwiseError as fault:
                        raise ToolFault(f"{what}: {fault}") from fault
        finally:
            box.stopwatch.add(TRACK, self._name, started)
