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
_EXIT_TRACEBACK, _EXIT_UNPRINTED = 1, 120
"""Python's exit statuses: after an uncaught exception, and if standard output couldn't be flushed at the
end."""
_TIMERS = ("SIGALRM", "SIGVTALRM", "SIGPROF")
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")
_ECHO_S = 0.5  # within this time a signal to the whole process group reaches both processes
_NUDGE, _NUDGES_S = signal.Signals.__members__.get("SIGURG", 0), (0.5, 2.0, 10.0)
"""A signal that wakes the child's main thread, and the seconds after any other signal at which it is sent.
Without it, a signal that arrives just before the main thread begins to wait, or in another thread, would be
handled only after the wait."""
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
    parent, (readable, writable) = os.getpid(), os.pipe()
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
    is_line_buffered = stream.isatty() or stream is sys.stderr
    return _UnclosableStream(
        open(descriptor, "wb"), stream.encoding, stream.errors, line_buffering=is_line_buffered
    )


def _is_open(stream: TextIO) -> bool:
    try:
        os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return True


class _Guard:
    """Waits in the parent for the child, and passes on the signals that were sent to the parent alone."""

    def __init__(self, child: int, heard: int) -> None:
        self._child, self._heard = child, heard
        self._passed: Counter[int] = Counter()  # signals that were passed on and aren't in the pipe yet
        self._reached: dict[int, float] = {}  # signal → when the child last got it from elsewhere
        self._due: list[tuple[float, int]] = []
        """`(time, signal)`: when to send a `_NUDGE`, or to pass on a signal that the child hasn't got by
        then."""

    def wait(self, old_mask: set[int]) -> int:
        """Restores the signal mask `old_mask`, waits until the child has ended, and returns the command's
        exit status."""
        own, wakeup = os.pipe()
        for number in (own, wakeup):
            os.set_blocking(number, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in _signals():
            # nohup ignores SIGHUP on purpose. The child decides whether Ctrl-C is ignored.
            if signal.getsignal(number) is not signal.SIG_IGN or number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        sources = [own, self._heard]
        while True:
            process, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED)
            if process and not os.WIFSTOPPED(status):
                return _fate(os.waitstatus_to_exitcode(status))
            if process:
                os.kill(
                    os.getpid(), signal.SIGSTOP
                )  # so that the shell sees a stopped job, and continues both processes
            timeout_s = max(0.0, min(self._due)[0] - time.monotonic()) if self._due else None
            readable, _, _ = select.select(sources, [], [], timeout_s)
            now = time.monotonic()
            if self._heard in readable:
                numbers = os.read(self._heard, 4096)
                if not numbers:
                    sources.remove(self._heard)
                self._hear(numbers, now)
            for number in os.read(own, 4096) if own in readable else b"":
                if number != signal.SIGCHLD:
                    is_harmless_twice = number in (signal.SIGCONT, signal.SIGTSTP)
                    self._due.append((now if is_harmless_twice else now + _ECHO_S, number))
            self._pass_on(now)

    def _hear(self, numbers: bytes, now: float) -> None:
        for number in numbers:
            if self._passed[number]:
                self._passed[number] -= 1
            else:
                self._reached[number] = now
            if number != _NUDGE:
                self._due += [(now + after, _NUDGE) for after in _NUDGES_S]

    def _pass_on(self, now: float) -> None:
        due, self._due = self._due, [entry for entry in self._due if entry[0] > now]
        for at, number in due:
            if at <= now and abs(self._reached.get(number, -math.inf) - (at - _ECHO_S)) >= _ECHO_S:
                self._passed[number] += 1
                os.kill(self._child, number)


def _fate(code: int) -> int:
    """The command's exit status. `code` is the child's, or -n for signal n. Prints an error after an
    unexpected end."""
    status = 128 - code if code < 0 else code
    if code in (-signal.SIGINT, EXIT_INTERRUPTED) or (
        CALLS.is_finished and code == CALLS.status != _EXIT_UNPRINTED
    ):
        return status
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    when = "" if code < 0 else " before it was done"
    if CALLS.is_finished:
        when = " when all was done" if CALLS.status == 0 else " after an error"
    how = f"was ended by {name}{when}" if code < 0 else f"ended with exit status {code}{when}"
    advice = "; an environment that can't continue should raise an exception, which fails one episode"
    if name in _TIMERS:
        how, advice = (
            f"{how}, as a timer does (signal.alarm, signal.setitimer)",
            "; leave timers to env_step_timeout_s",
        )
    elif _EXIT_UNPRINTED in (code, CALLS.status):
        how, advice = (
            f"{how}, because its last words couldn't be written: its files were closed (os.closerange?)",
            "",
        )
    elif code == -signal.SIGKILL:
        how, advice = f"{how}, as the system does when memory runs out", ""
    going_on, last = CALLS.going_on(), CALLS.last()
    where = (
        "in "
        + "; or ".join(going_on[:5])
        + (f"; or {len(going_on) - 5} more calls" if len(going_on) > 5 else "")
    )
    if not going_on:
        where = "while no code of an environment was called" + (
            f" (the last call was {last})" if last else ""
        )
    os.write(2, f"error: the process {how}, {where}{advice}\n".encode(errors="replace"))
    return status or EXIT_UNFINISHED
