"""Threads for calls that may never return. They are daemons, so none of them keeps the process alive. Python
joins the threads of its own executor at exit, where one stuck call would hang the process for ever."""

import asyncio
import ctypes
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any


class DaemonThread:
    """One thread that makes calls in the order of `start`, until `end`.

    >>> thread = DaemonThread("doctest")
    >>> thread.start(max, 2, 3).result()
    3
    >>> thread.end()
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queues a call. If its future is cancelled before its turn, the call is never made."""
        result: Future[Any] = Future()
        self._calls.put((result, partial(function, *args)))
        return result

    def end(self) -> None:
        """Ends the thread after the calls queued so far."""
        self._calls.put(None)

    def interrupt(self) -> None:
        """Raises SystemExit in the running call. A Python loop ends at once; a wait in C code ends when the C
        code returns."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit)
        )

    def stack(self) -> str:
        """Where the thread stands, outermost call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"

    def join(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` seconds for the thread to finish; call `end` first."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            result, function = call
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                # Boundary: the thread that waits for the result gets what was raised.
                except BaseException as error:
                    if not result.done():  # an `interrupt` may come while the result is handed over
                        result.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        while True:
            try:
                return self._calls.get()
            except SystemExit:  # an `interrupt` of a call that has just returned by itself
                continue


class DaemonPool:
    """Threads for calls of one kind, one per concurrent call. They are reused, and end when the pool is
    garbage-collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[DaemonThread] = []
        weakref.finalize(self, _end_all, self._idle).atexit = False

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Makes a call in a thread and returns its result. Interrupts the call if the waiting task is
        cancelled."""
        thread = self._idle.pop() if self._idle else DaemonThread(self._name)
        result = thread.start(function, *args)
        try:
            return await asyncio.wrap_future(result)
        finally:
            if result.done():
                self._idle.append(thread)
            else:
                thread.end()
                thread.interrupt()


def _end_all(threads: list[DaemonThread]) -> None:
    for thread in threads:
        thread.end()


class DaemonExecutor(ThreadPoolExecutor):
    """An event loop's default executor (`asyncio.to_thread`) with a daemon thread for each call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        thread = DaemonThread("to_thread")
        result = thread.start(partial(fn, *args, **kwargs))
        thread.end()
        return result
