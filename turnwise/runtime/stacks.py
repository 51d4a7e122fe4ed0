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
_OWN = os.path.join(Path(__file__).parents[1], "")  # the package's folder
_IDLE = {
    (str(Path(__file__).with_name("threads.py")), "_next"),
    (str(Path(__file__).with_name("time_limit.py")), "_watch"),
}
"""The innermost calls of turnwise's own threads that have nothing to do."""
_EVENT_LOOP = str(
    Path(asyncio.__file__).parent
)  # the folder of asyncio, whose own calls don't show who waits for whom


def describe_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """The stacks of the busy threads, except the calling one and watchdogs, and of the suspended tasks of
    `loop`: at most `MAX_STACKS` of each. Equal stacks are shown once. Every line is indented, so that the
    text can go below a heading."""
    running = None if loop is None else asyncio.current_task(loop)
    frames = sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads = [thread for thread in others if thread.ident in frames and thread.name != WATCHDOG]
    threads.sort(key=lambda thread: thread is not threading.main_thread())
    names = {thread: thread.name for thread in threads}
    if running is not None and threading.main_thread() in names:
        names[threading.main_thread()] += f" in task {running.get_name()!r}"
    tasks = [] if loop is None else [task for task in asyncio.all_tasks(loop) if task is not running]
    tasks.sort(key=lambda task: task.get_name())
    stacks = {thread: _stack(traceback.walk_stack(frames[thread.ident or 0]))[::-1] for thread in threads}
    lines = [
        *_groups(
            "thread",
            ((names[thread], stack) for thread, stack in stacks.items() if not _waits_for_work(stack)),
        ),
        *_groups("task", ((task.get_name(), _stack(_awaited(task))) for task in tasks)),
    ]
    return "\n".join(f"  {line}" for line in lines)


def describe_error(error: BaseException) -> str:
    """The calls of `describe_calls`, and below them the exception itself."""
    return "\n".join([*describe_calls(error), "".join(traceback.format_exception_only(error)).strip()])


def describe_calls(error: BaseException) -> list[str]:
    """A line for each of the last three calls outside turnwise and libraries. If there are none, one for the
    innermost call."""
    calls = traceback.extract_tb(error.__traceback__)
    # Compiled modules have frames too, but no lines to show.
    foreign = [call for call in calls if call.line and not call.filename.startswith((*_LIBRARIES, _OWN))]
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
    return all(place.file.startswith(_LIBRARIES) and not place.file.startswith(_OWN) for place in stack) or (
        (stack[-1].file, stack[-1].function) in _IDLE
    )


def _stack(frames: Iterable[tuple[FrameType, int]]) -> Stack:
    calls = (StackCall(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)
    return tuple(call for call in calls if not call.file.startswith(_EVENT_LOOP))


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
    for stack, same in list(names.items())[:MAX_STACKS]:
        yield f"{kind} {same[0]}:" if len(same) == 1 else f"{len(same)} {kind}s, one of them {same[0]}:"
        if len(stack) > MAX_CALLS:
            yield f"  … {len(stack) - MAX_CALLS} calls further out"
        for place in stack[-MAX_CALLS:]:
            source = linecache.getline(place.file, place.line).strip()
            yield f"  {place.file}:{place.line} in {place.function}: {source}".rstrip(": ")
    rest = sum(len(same) for same in list(names.values())[MAX_STACKS:])
    if rest:
        yield f"and {rest} more {kind}s"
