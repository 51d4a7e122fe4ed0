"""Runs a command in a child process. If the child ends before the command is done, the parent says why and
returns an error status. The fork comes before heavy imports. Child and parent share a process group, so
Ctrl-C and Ctrl-Z work as usual."""

import io
import math
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from turnwise.lifecycle.interrupt import EXIT_INTERRUPTED
from turnwise.runtime.call_board import CALLS

EXIT_UNFINISHED = 70
"""Exit status reported instead of 0 when the command's process ended before the command was done
(EX_SOFTWARE)."""
_EXIT_TRACEBACK = 1
"""Python's exit status after an uncaught exception."""
_EXIT_UNPRINTED = 120
"""Python's exit status if standard output couldn't be flushed at the end."""
_TIMERS = ("SIGALRM", "SIGVTALRM", "SIGPROF")
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")
_ECHO_S = 0.5  # within this time a signal to the whole process group reaches both processes
_NUDGE = signal.Signals.__members__.get("SIGURG", 0)
"""A signal that wakes the child's main thread. Without it, a signal that arrives just before the main thread
begins to wait, or in another thread, would be handled only after the wait."""
_NUDGES_S = (0.5, 2.0, 10.0)
"""Seconds after any other signal at which a `_NUDGE` is sent."""
_SET_PARENT_DEATH_SIGNAL = 1
_LOOK_S = 1.0


def guarded(run: Callable[[], int]) -> int:
    """Runs `run` in a forked child, and returns the exit status in both processes. On Windows there is no
    child."""
    if sys.platform == "win32":
        return run()
    streams = {name: vars(sys)[name] for name in ("stdout", "stderr") if vars(sys)[name] is not None}
    for stream in streams.values():
        stream.flush()
    parent = os.getpid()
    readable, writable = os.pipe()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _signals())
    child = os.fork()
    if child == 0:
        os.close(readable)
        _die_with(parent)
        # Python writes the number of each signal that arrives here into the pipe at once, before it runs a
        # handler.
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(_NUDGE, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        vars(sys).update({name: _unclosable(stream) for name, stream in streams.items()})
        status = _EXIT_TRACEBACK
        try:
            status = run()
        except KeyboardInterrupt:  # a second one, while the first is handled
            status = EXIT_INTERRUPTED
        finally:
            CALLS.finish(status if _is_open(sys.stderr) else _EXIT_UNPRINTED)
            signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
        return status
    os.close(writable)
    return _Guard(child, readable).wait(old_mask)


def _signals() -> set[int]:
    return {
        signal.SIGCHLD,
        *(signal.Signals[name] for name in _PASSED_ON if name in signal.Signals.__members__),
    }


def _die_with(parent: int) -> None:
    """Makes this process die when the parent does, however the parent ends."""
    if sys.platform == "linux":
        import ctypes  # imported here, since the parent doesn't need it

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(EXIT_UNFINISHED)
    else:
        threading.Thread(target=_die_after, args=[parent], name="guard", daemon=True).start()


def _die_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _UnclosableStream(io.TextIOWrapper):
    """A standard stream that can't be closed. A user's code may try to, and the command still has results to
    print."""

    def close(self) -> None:
        self.flush()


def _unclosable(stream: TextIO) -> TextIO:
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):
        return stream
    return _UnclosableStream(
        open(descriptor, "wb"),
        stream.encoding,
        stream.errors,
        line_buffering=stream.isatty() or stream is sys.stderr,
    )


def _is_open(stream: TextIO) -> bool:
    try:
        os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return True


class _Guard:
    """Waits in the parent for the child, and passes on the signals that were sent to the parent alone."""

    def __init__(self, child: int, arrivals: int) -> None:
        self._child = child
        self._arrivals = arrivals  # the end of the pipe that the child writes its signals into
        self._passed: Counter[int] = Counter()  # signals that were passed on and aren't in the pipe yet
        self._reached: dict[int, float] = {}  # signal → when the child last got it from elsewhere
        self._due: list[tuple[float, int]] = []
        """`(time, signal)`: when to send a `_NUDGE`, or to pass on a signal that the child hasn't got by
        then."""

    def wait(self, old_mask: set[int]) -> int:
        """Restores the signal mask `old_mask`, waits until the child has ended, and returns the command's
        exit status."""
        own_signals = _listen()
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        sources = [own_signals, self._arrivals]
        while True:
            process, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED)
            if process and not os.WIFSTOPPED(status):
                return _fate(os.waitstatus_to_exitcode(status))
            if process:
                # So that the shell sees a stopped job, and continues both processes.
                os.kill(os.getpid(), signal.SIGSTOP)
            readable, _, _ = select.select(sources, [], [], self._timeout_s())
            time_s = time.monotonic()
            if self._arrivals in readable:
                numbers = os.read(self._arrivals, 4096)
                if not numbers:
                    sources.remove(self._arrivals)
                self._note_arrivals(numbers, time_s)
            if own_signals in readable:
                self._plan(os.read(own_signals, 4096), time_s)
            self._pass_on(time_s)

    def _timeout_s(self) -> float | None:
        """Seconds until the next signal is due; None if none is."""
        if not self._due:
            return None
        next_time, _ = min(self._due)
        return max(0.0, next_time - time.monotonic())

    def _note_arrivals(self, numbers: bytes, time_s: float) -> None:
        for number in numbers:
            if self._passed[number]:
                self._passed[number] -= 1
            else:
                self._reached[number] = time_s
            if number != _NUDGE:
                self._due += [(time_s + delay_s, _NUDGE) for delay_s in _NUDGES_S]

    def _plan(self, numbers: bytes, time_s: float) -> None:
        for number in numbers:
            if number in (signal.SIGCONT, signal.SIGTSTP):  # harmless if the child gets them twice
                self._due.append((time_s, number))
            elif number != signal.SIGCHLD:
                self._due.append((time_s + _ECHO_S, number))

    def _pass_on(self, time_s: float) -> None:
        due = [entry for entry in self._due if entry[0] <= time_s]
        self._due = [entry for entry in self._due if entry[0] > time_s]
        for due_s, number in due:
            sent_s = due_s - _ECHO_S
            reached_s = self._reached.get(number, -math.inf)
            if abs(reached_s - sent_s) >= _ECHO_S:
                self._passed[number] += 1
                os.kill(self._child, number)


def _listen() -> int:
    """The end of a pipe into which Python writes the number of each signal that arrives in this process."""
    readable, writable = os.pipe()
    for descriptor in (readable, writable):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _signals():
        # nohup ignores SIGHUP on purpose. The child decides whether Ctrl-C is ignored.
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if not is_ignored or number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, lambda *_: None)
    return readable


def _fate(code: int) -> int:
    """The command's exit status. `code` is the child's, or -n for signal n. Prints an error after an
    unexpected end."""
    status = 128 - code if code < 0 else code
    if code in (-signal.SIGINT, EXIT_INTERRUPTED) or (
        CALLS.is_finished and code == CALLS.status != _EXIT_UNPRINTED
    ):
        return status
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    end = f"was ended by {name}" if code < 0 else f"ended with exit status {code}"
    if CALLS.is_finished:
        end += " when all was done" if CALLS.status == 0 else " after an error"
    elif code >= 0:
        end += " before it was done"
    cause = ""
    advice = "; an environment that can't continue should raise an exception, which fails one episode"
    if name in _TIMERS:
        cause = ", as a timer does (signal.alarm, signal.setitimer)"
        advice = "; leave timers to env_step_timeout_s"
    elif _EXIT_UNPRINTED in (code, CALLS.status):
        cause = ", because its last words couldn't be written: its files were closed (os.closerange?)"
        advice = ""
    elif code == -signal.SIGKILL:
        cause = ", as the system does when memory runs out"
        advice = ""
    message = f"error: the process {end}{cause}, {_running_calls()}{advice}\n"
    os.write(2, message.encode(errors="replace"))
    return status or EXIT_UNFINISHED


def _running_calls() -> str:
    """The calls of an environment's code that the process was in when it ended."""
    running = CALLS.going_on()
    if not running:
        last_call = CALLS.last()
        return "while no code of an environment was called" + (
            f" (the last call was {last_call})" if last_call else ""
        )
    calls = "in " + "; or ".join(running[:5])
    if len(running) > 5:
        calls += f"; or {len(running) - 5} more calls"
    return calls
