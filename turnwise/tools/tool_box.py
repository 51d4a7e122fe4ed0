"""The tools of one episode: their states, calls with deadlines, and whose fault an error is."""

import asyncio
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

from turnwise.errors import ConfigError, EnvironmentFault, ToolError
from turnwise.protocols import Tool
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.tools.argument_schema import ArgumentSchema
from turnwise.tools.first_calls import FirstCalls
from turnwise.types import Observation, Task

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
    waited_s: float = 0.0
    """Seconds that the call waited for a place among concurrent calls of the tool."""


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
        if not isinstance(function, Mapping):
            function = {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            form = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
            raise ConfigError(
                f"the schema of {type(self.tool).__name__} has no function with a name; a tool's schema is "
                f"{form}"
            )
        self.name = name
        self.first_calls = FirstCalls(name)
        try:
            json.dumps(self.tool.schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as fault:
            raise ConfigError(
                f"the schema of the tool {name} isn't JSON: {fault}; write it as JSON can (a date as a text)"
            ) from fault
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
        counts = Counter(self.names)
        doubled = sorted(name for name, count in counts.items() if count > 1)
        if doubled:
            raise ConfigError(
                f"two tools are called {', '.join(doubled)}; a call names one tool, so rename one of them"
            )

    @property
    def names(self) -> list[str]:
        return [offered.name for offered in self.tools]

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [offered.tool.schema for offered in self.tools]

    def select(self, columns: Mapping[str, Any]) -> list[OfferedTool]:
        """All tools, or only those that the row's `extra_info.tool_selection` names."""
        extra = columns.get("extra_info") or {}
        selection = extra.get("tool_selection")
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
        self._box = box
        self._task = task
        self._tools = {offered.name: offered for offered in tools}
        self._states: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        self.metrics = {"unknown_tools": 0.0}
        for name in self._tools:
            for figure in ("calls", "errors", "seconds"):
                self.metrics[f"tool/{name}/{figure}"] = 0.0

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
        stopwatch = self._box.stopwatch
        started = stopwatch.now()
        try:
            result = await self._executed(offered, arguments)
        finally:
            stopwatch.add(TRACK, name, started)
            self.metrics[f"tool/{name}/seconds"] += stopwatch.now() - started
        self.metrics[f"tool/{name}/errors"] += result.is_error
        return result

    async def rewards(self) -> dict[str, float]:
        """Name → reward of each tool whose reward for this episode isn't 0. Raises ToolFault unless all are
        finite numbers."""
        rewards: dict[str, float] = {}
        for name, offered in self._tools.items():
            number = await self._answer(offered, "calc_reward", self._states[name])
            reward = finite(number, f"{name}.calc_reward")
            if reward:
                rewards[name] = reward
        return rewards

    async def _executed(self, offered: OfferedTool, arguments: Mapping[str, Any]) -> ToolResult:
        if problem := offered.problem_of(arguments):
            return _undecoded(f"Invalid arguments for {offered.name!r}: {problem}")
        state = self._states[offered.name]
        waited_s = 0.0
        asked = self._box.stopwatch.now()
        try:
            async with offered.places:
                waited_s = self._box.stopwatch.now() - asked
                result = await self._answer(offered, "execute", state, arguments)
        except MISTAKES as mistake:
            offered.first_calls.raised(mistake)
            problem = str(mistake) or type(mistake).__name__
            return ToolResult(readable(f"Error executing {offered.name!r}: {problem}"), True, waited_s)
        offered.first_calls.returned()
        text: Any = result
        kind = ""
        if isinstance(result, Observation):
            text = result.text
            kind = "pictures" if result.media else ""
        if not isinstance(text, str):
            kind = f"a {type(text).__name__}"
        if kind:
            raise ToolFault(f"the tool {offered.name} returned {kind}; a tool returns a string")
        return ToolResult(readable(text), waited_s=waited_s)

    async def _answer(self, offered: OfferedTool, method: str, *arguments: Any) -> Any:
        call = f"{offered.name}.{method}"
        timeout_s = offered.timeout_s
        setting = "timeout_s of the tool"
        if timeout_s is None:
            timeout_s = self._box.timeout_s
            setting = "agent.tool_timeout_s"
        waiter = f"an episode of {self._task.tag}"
        limit = self._box.watchdog.waiting(waiter, call, timeout_s, setting, ToolFault)
        with Foreign(call, self._task.id):
            async with limit:
                result = getattr(offered.tool, method)(*arguments)
                if inspect.isawaitable(result):
                    result = await result
                return result


def _undecoded(text: str) -> ToolResult:
    logger.info("Failed to decode tool call: %s", text)
    return ToolResult(text, is_error=True)


def finite(number: Any, call: str) -> float:
    """The number that a call returned, as a float. Raises ToolFault if it isn't a finite number."""
    if isinstance(number, bool) or not is_finite(number):
        raise ToolFault(f"{call} returned {number!r:.80}; it must be one finite number")
    return float(number)


def is_finite(number: Any) -> bool:
    """Whether a value of a tool or user is a number that a float can hold."""
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max


def readable(text: str) -> str:
    """The text with `?` in place of lone surrogates, which no tokenizer accepts."""
    return text.encode(errors="replace").decode()
