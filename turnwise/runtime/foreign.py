"""Guards calls into users' code. `call_board` lists the running calls, so that a report can name the call in
which the process ended. SystemExit and other exceptions outside `Exception` become EnvironmentFaults, except
Ctrl-C, cancellation, deadlines."""

import asyncio
import dis
import traceback
from types import TracebackType
from typing import Self

from turnwise.errors import EnvironmentFault, TurnwiseError
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.watchdog import Interrupt

_HANDLERS = (
    "asyncio.runners",
    "turnwise.lifecycle.interrupt",
)  # the signal handlers of these modules raise KeyboardInterrupt


class Foreign:
    """Wraps a call of a user's code, and lists it on the `call_board` if `episode` isn't empty. Turns
    StopIteration, and every exception outside `Exception`, into an `EnvironmentFault` that names the call.
    With `are_faults` it turns all exceptions into such a fault. Errors of turnwise, Ctrl-C, cancellation and
    deadlines always pass unchanged."""

    __slots__ = ("_are_faults", "_call", "_episode", "_line")

    def __init__(self, call: str, episode: str = "", are_faults: bool = False) -> None:
        self._call, self._episode, self._are_faults = call, episode, are_faults

    def __enter__(self) -> Self:
        self._line = CALLS.begin(f"{self._call}, {self._episode}") if self._episode else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        CALLS.end(self._line)
        if fault is None:
            return
        is_ordinary = (
            isinstance(fault, Exception) and not isinstance(fault, StopIteration) and not self._are_faults
        )
        if is_ordinary or _is_from_outside(fault):
            return
        if isinstance(fault, SystemExit):
            what = f"called sys.exit({fault.code!r})"
        else:
            what = f"raised {''.join(traceback.format_exception_only(fault)).strip()}"
        place = traceback.extract_tb(trace)[-1]
        raise EnvironmentFault(
            f"{self._call} {what} ({place.filename}, line {place.lineno}); "
            + (
                "fix it there"
                if isinstance(fault, Exception)
                else "let it raise an Exception, which fails one episode"
            )
        ) from fault


def _is_from_outside(fault: BaseException) -> bool:
    """Whether the fault passes unchanged: an error of turnwise, Ctrl-C, a cancelled task, a deadline, a
    discarded coroutine."""
    match fault:
        case TurnwiseError() | Interrupt():
            return True
        case asyncio.CancelledError():
            return is_cancelled()
        case KeyboardInterrupt() | GeneratorExit():
            return not _is_raised(fault)
        case _:
            return False


def is_cancelled() -> bool:
    """Whether somebody has cancelled the running task. False outside an event loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def _is_raised(fault: BaseException) -> bool:
    """Whether a `raise` statement of foreign code raised the fault, rather than Ctrl-C or the closing of a
    coroutine."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__") in _HANDLERS:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
