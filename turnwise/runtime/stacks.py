"""The stacks of all threads and of an event loop's tasks, short enough to read."""

import asyncio
import contextlib
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any, NamedTuple

WATCHDOG = "watchdog"
"""Name of the watchdogs' threads, which the described stacks leave out."""
MAX_CALLS = 8
"""Maximum number of calls shown of one stack. The innermost ones are shown."""
MAX_STACKS = 4
"""Maximum number of different stacks shown for threads, and the same number for tasks."""


class StackCall(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str


Stack = tuple[StackCall, ...]
"""The calls of a stack, the outermost first."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_PACKAGE = os.path.join(Path(__file__).parents[1], "")
_IDLE = {
    (str(Path(__file__).with_name("threads.py")), "_next"),
    (str(Path(__file__).with_name("time_limit.py")), "_watch"),
}
"""The innermost calls of turnwise's own threads that have nothing to do."""
_EVENT_LOOP = str(Path(asyncio.__file__).parent)
"""The folder of asyncio, whose own calls don't show who waits for whom."""


def describe_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """The stacks of the busy threads, except the calling one and watchdogs, and of the suspended tasks of
    `loop`: at most `MAX_STACKS` of each. Equal stacks are shown once. Every line is indented, so that the
    text can go below a heading."""
    running: asyncio.Task[Any] | None = None
    tasks: list[asyncio.Task[Any]] = []
    if loop is not None:
        running = asyncio.current_task(loop)
        tasks = [task for task in asyncio.all_tasks(loop) if task is not running]
        tasks.sort(key=lambda task: task.get_name())
    lines = [
        *_groups("thread", _busy_threads(running)),
        *_groups("task", [(task.get_name(), _stack(_awaited(task))) for task in tasks]),
    ]
    return "\n".join(f"  {line}" for line in lines)


def _busy_threads(running: asyncio.Task[Any] | None) -> list[tuple[str, Stack]]:
    """Name and stack of each busy thread, the main one first. The main thread's name includes the `running`
    task."""
    frames = sys._current_frames()
    main = threading.main_thread()
    busy: list[tuple[str, Stack]] = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not main):
        is_hidden = thread is threading.current_thread() or thread.name == WATCHDOG
        frame = frames.get(thread.ident or 0)
        if is_hidden or frame is None:
            continue
        # `walk_stack` begins with the innermost call.
        stack = _stack(traceback.walk_stack(frame))[::-1]
        if _waits_for_work(stack):
            continue
        name = thread.name
        if thread is main and running is not None:
            name += f" in task {running.get_name()!r}"
        busy.append((name, stack))
    return busy


def describe_error(error: BaseException) -> str:
    """The calls of `describe_calls`, and below them the exception itself."""
    text = "".join(traceback.format_exception_only(error))
    return "\n".join([*describe_calls(error), text.strip()])


def describe_calls(error: BaseException) -> list[str]:
    """A line for each of the last three calls outside turnwise and libraries. If there are none, one for the
    innermost call."""
    calls = traceback.extract_tb(error.__traceback__)
    # Compiled modules have frames too, but no lines to show.
    hidden = (*_LIBRARIES, _PACKAGE)
    foreign = [call for call in calls if call.line and not call.filename.startswith(hidden)]
    shown = (foreign or calls[-1:])[-3:]
    return [f"{_relative(call.filename)}:{call.lineno} in {call.name}: {call.line}" for call in shown]


def _relative(file: str) -> str:
    """The path of a file, shortened to a relative one if the file is below the current folder."""
    with contextlib.suppress(OSError):  # the current folder may be gone
        return file.removeprefix(os.path.join(os.getcwd(), ""))
    return file


def _waits_for_work(stack: Stack) -> bool:
    """Whether a thread is idle: its stack is library code only (a writer or monitor), or it waits for
    something to do."""
    if all(map(_is_library_code, stack)):
        return True
    innermost = stack[-1]
    return (innermost.file, innermost.function) in _IDLE


def _is_library_code(call: StackCall) -> bool:
    # The package itself may be installed among the libraries.
    return call.file.startswith(_LIBRARIES) and not call.file.startswith(_PACKAGE)


def _stack(frames: Iterable[tuple[FrameType, int]]) -> Stack:
    calls: list[StackCall] = []
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_EVENT_LOOP):
            calls.append(StackCall(code.co_filename, line, code.co_name))
    return tuple(calls)


def _awaited(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    """The frames and lines of a suspended task's awaited coroutines (`Task.get_stack` shows the first one
    only)."""
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
        yield awaited.cr_frame, awaited.cr_frame.f_lineno
        awaited = awaited.cr_await


def _groups(kind: str, stacks: Iterable[tuple[str, Stack]]) -> Iterator[str]:
    names: dict[Stack, list[str]] = {}
    for name, stack in stacks:
        names.setdefault(stack, []).append(name)
    for stack, owners in list(names.items())[:MAX_STACKS]:
        if len(owners) == 1:
            yield f"{kind} {owners[0]}:"
        else:
            yield f"{len(owners)} {kind}s, one of them {owners[0]}:"
        if len(stack) > MAX_CALLS:
            yield f"  … {len(stack) - MAX_CALLS} calls further out"
        for place in stack[-MAX_CALLS:]:
            source = linecache.getline(place.file, place.line).strip()
            yield f"  {place.file}:{place.line} in {place.function}: {source}".rstrip(": ")
    num_hidden = sum(map(len, list(names.values())[MAX_STACKS:]))
    if num_hidden:
        yield f"and {num_hidden} more {kind}s"
