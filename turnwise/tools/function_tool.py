"""A plain function as a tool, whose schema comes from the function's signature and docstring."""

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

from pydantic import BaseModel

from turnwise.errors import ConfigError, EnvironmentFault, nearest
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.signal_watch import REFUSAL, SignalWatch
from turnwise.runtime.threads import DaemonPool
from turnwise.tools.function_schema import FunctionSignature, name_of
from turnwise.types import Observation, Task

logger = logging.getLogger(__name__)

_NO_SIGNALS = (
    "it runs in a thread, where Python allows no signal handlers (SIGALRM): make it `async def`, or remove "
    "its own time limit, since agent.tool_timeout_s bounds each call"
)


class StatelessTool:
    """Base class of tools (`protocols.Tool`) without state and reward."""

    async def create(self, task: Task) -> None: ...

    async def calc_reward(self, state: None) -> float:
        return 0.0

    async def release(self, state: None) -> None: ...


class FunctionTool(StatelessTool):
    """A function as a tool, also a method, an object with `__call__` or a `partial`. A coroutine function is
    awaited; any other function runs in a thread. A result that isn't text is shown as JSON. Without a
    `schema`, arguments become what the type hints name (enums, dataclasses, pydantic models, dates), and
    ConfigError is raised if the function lacks type hints, or a Google-style docstring that describes all
    parameters.

    >>> def add(a: int, b: int) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: The first number.
    ...         b: The second number.
    ...     '''
    ...     return a + b
    >>> FunctionTool(add).schema["function"]["parameters"]["required"]
    ['a', 'b']
    """

    def __init__(self, function: Callable[..., Any], schema: Mapping[str, Any] | None = None) -> None:
        self._signature: FunctionSignature | None = None
        if not schema:
            self._signature = FunctionSignature(function)
            schema = self._signature.schema()
        self.schema = schema
        self._function = function
        forms = (function, type(function).__call__)
        self._is_async = any(map(inspect.iscoroutinefunction, forms))
        self._name = name_of(function)
        self._pool = DaemonPool(self._name)
        self._has_warned = False

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str | Observation:
        by_position: list[Any] = []
        by_name = arguments
        if self._signature:
            by_position, by_name = self._signature.bound(arguments)
        call = partial(self._function, *by_position, **by_name)
        if self._is_async:
            result = call()
        else:
            result = await self._pool.call(partial(self._called, call))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, str | Observation):
            return result
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False, default=_json_value)
        except (TypeError, ValueError, RecursionError) as fault:
            raise EnvironmentFault(
                f"the tool {self._name} returned a {type(result).__name__}, which is no text and can't be "
                f"written as JSON ({fault}); return a text"
            ) from fault

    def _called(self, call: Callable[[], Any]) -> Any:
        with SignalWatch() as signals:
            try:
                with Foreign(self._name):
                    result = call()
            except ValueError as fault:
                if REFUSAL in str(fault):
                    # It isn't the model's mistake, as other ValueErrors are.
                    raise EnvironmentFault(f"the tool {self._name}: {fault}; {_NO_SIGNALS}") from fault
                raise
        if signals.num_refused and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the tool %s tried to set a signal handler and caught the error; %s", self._name, _NO_SIGNALS
            )
        return result


def _json_value(value: Any) -> Any:
    """What JSON shows of a dataclass, a pydantic model, an enum, or a number or array of numpy or torch."""
    match value:
        case Enum():
            return value.value
        case BaseModel():
            return value.model_dump(mode="json")
        case object(tolist=tolist):
            return tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def check_keys(tool: str, config: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raises ConfigError if a tool's `config` has a key that isn't `allowed`."""
    names = list(allowed)
    for key in config:
        if key not in names:
            raise ConfigError(
                f"{tool}: config has no key {key!r}; it has {', '.join(names)}.{nearest(key, names)}"
            )
