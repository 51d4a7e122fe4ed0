"""Calls a user's reward: coroutine functions on the event loop, others in a thread. What it raises becomes a
RewardFault."""

import asyncio
import inspect
import logging
import re
import signal
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from turnwise.data.reward_scores import RewardFault
from turnwise.errors import ConfigError, EnvironmentFault
from turnwise.runtime import signal_watch
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.signal_watch import REFUSAL, SignalWatch
from turnwise.runtime.threads import DaemonPool

logger = logging.getLogger(__name__)

_OF_SIGNALS = (signal.__file__, signal_watch.__file__)
"""Files whose lines say nothing about where a reward goes wrong."""
_NO_SIGNALS = (
    "it runs in a thread, where Python allows no signal handlers (SIGALRM): make it `async def`, or switch "
    "its own time limit off (math_verify: parsing_timeout=None, timeout_seconds=None), since "
    "data.reward_timeout_s bounds each call"
)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function, or of an object with `__call__`, returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameters_of(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of the reward `name`. Raises ConfigError if Python doesn't know them, as for parts of C
    libraries."""
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError) as fault:
        raise ConfigError(
            f"data.reward {name}: Python doesn't know the parameters of this {type(function).__name__} "
            f"({fault}); give a function (completions, **columns) instead"
        ) from fault


@lru_cache(maxsize=256)
def warn_once(sentence: str) -> None:
    """Logs a warning, unless it was logged before."""
    logger.warning("%s", sentence)


async def call_reward(
    function: Callable[..., Any],
    name: str,
    task_id: str,
    arguments: Mapping[str, Any],
    pool: DaemonPool,
    remedies: Mapping[str, str] | None = None,
) -> Any:
    """What the reward `name` returns for the task. Raises RewardFault if it raises an exception; `remedies`
    has a sentence for exceptions whose text matches a pattern."""

    def call() -> Any:
        with SignalWatch() as signals, Foreign(f"data.reward {name}", task_id):
            result = function(**arguments)
        if signals.num_refused:
            warn_once(
                f"data.reward {name} tried to set a signal handler and caught the error: its scores may be "
                f"wrong; {_NO_SIGNALS}"
            )
        return result

    try:
        if is_async(function):
            with Foreign(f"data.reward {name}", task_id):
                return await function(**arguments)
        result = await pool.call(call)
        return await result if inspect.isawaitable(result) else result
    except (EnvironmentFault, asyncio.CancelledError):
        raise
    except Exception as fault:  # boundary: a reward may raise anything
        frames = traceback.extract_tb(fault.__traceback__)
        place = next((frame for frame in reversed(frames) if frame.filename not in _OF_SIGNALS), frames[-1])
        text = "".join(traceback.format_exception_only(fault)).strip()
        # No log or file can hold half of a character.
        text = text.encode(errors="replace").decode()
        advice = _advice(text, remedies or {})
        raise RewardFault(
            f"data.reward {name} raised {text} ({place.filename}, line {place.lineno}); {advice}"
        ) from fault


def _advice(text: str, remedies: Mapping[str, str]) -> str:
    if REFUSAL in text:
        return _NO_SIGNALS
    return next((remedy for pattern, remedy in remedies.items() if re.search(pattern, text)), "fix it there")
