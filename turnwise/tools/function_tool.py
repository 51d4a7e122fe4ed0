"""A plain function as a tool, whose schema comes from the function's signature and docstring."""

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from turnwise.errors import ConfigError, EnvironmentFault, nearest
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.signal_watch import REFUSAL, SignalWatch
from turnwise.runtime.threads import DaemonPool
from turnwise.types import Observation, Task

logger = logging.getLogger(__name__)

_NO_SIGNALS = (
    "it runs in a thread, where Python allows no signal handlers (SIGALRM): make it `async def`, or leave its own time limit "
    "out, since agent.tool_timeout_s bounds each call"
)


class StatelessTool:
    """Base class of tools (`protocols.Tool`) without state and reward."""

    async def create(self, task: Task) -> None: ...

    async def calc_reward(self, state: None) -> float:
        return 0.0

    async def release(self, state: None) -> None: ...


class FunctionTool(StatelessTool):
    """A function as a tool. A coroutine function is awaited; any other function runs in a thread. A result that isn't text is
    shown as JSON. Without a `schema`, raises ConfigError if the function lacks type hints, or a Google-style docstring that
    describes all parameters.

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
        self.schema = schema or schema_of(function)
        self._function = function
        self._name = str(function.__name__)
        self._pool = DaemonPool(self._name)
        self._has_warned = False

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str | Observation:
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**arguments)
        else:
            result = await self._pool.call(partial(self._called, arguments))
        try:
            return result if isinstance(result, str | Observation) else json.dumps(result, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as fault:
            what = f"the tool {self._name} returned a {type(result).__name__}"
            raise EnvironmentFault(f"{what}, which is no text and can't be written as JSON ({fault}); return a text") from fault

    def _called(self, arguments: Mapping[str, Any]) -> Any:
        with SignalWatch() as signals:
            try:
                with Foreign(self._name):
                    result = self._function(**arguments)
            except ValueError as fault:
                if REFUSAL in str(fault):
                    # It isn't the model's mistake, as other ValueErrors are.
                    raise EnvironmentFault(f"the tool {self._name}: {fault}; {_NO_SIGNALS}") from fault
                raise
        if signals.num_refused and not self._has_warned:
            self._has_warned = True
            logger.warning("the tool %s tried to set a signal handler and caught the error; %s", self._name, _NO_SIGNALS)
        return result


def check_keys(tool: str, config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises ConfigError if a tool's `config` has a key that isn't `known`."""
    names = list(known)
    for key in config:
        if key not in names:
            raise ConfigError(f"{tool}: config has no key {key!r}; it has {', '.join(names)}.{nearest(key, names)}")


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's schema in OpenAI's form. Raises ConfigError if its signature or docstring doesn't say enough."""
    # Imported here, since `turnwise config` reads settings of tools without importing transformers.
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, NameError) as fault:
        raise ConfigError(
            f"the tool {function.__name__}: {fault}; a function that is a tool has type hints, and a docstring with `Args:` "
            "that describes each parameter"
        ) from fault
    # No family's template shows what a function returns.
    schema["function"].pop("return", None)
    return schema
