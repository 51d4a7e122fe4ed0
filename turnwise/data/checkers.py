"""Decides which answers are right: by the text reader alone, or also by math-verify, which knows algebra."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

from turnwise.data.answers import is_correct, stated_answer
from turnwise.errors import ConfigError, NotAvailableError, install_hint

logger = logging.getLogger(__name__)

Checker = Literal["text", "math_verify"]
MISSING = f"math_verify needs the package math-verify, which isn't installed; {install_hint('math')}"

_MAX_LENGTH = 4000
"""Characters of an answer that math-verify is asked about. No longer one is a formula."""
_START_S = 120.0
_ANSWER_S = 5.0
"""Seconds for one comparison. Nearly all take less than one."""
_GROUP_S = 30.0
"""Seconds for all comparisons of a group, within the default of data.reward_timeout_s."""


def check_checker(checker: str) -> None:
    """Raises ConfigError if there is no such checker, and NotAvailableError if its package isn't
    installed."""
    if checker not in ("text", "math_verify"):
        raise ConfigError(f"checker {checker!r}: it is text or math_verify")
    if checker == "math_verify" and find_spec("math_verify") is None:
        raise NotAvailableError(f"checker {MISSING}")


def are_correct(completions: Sequence[str], truths: Sequence[Any], checker: str = "text") -> list[bool]:
    """Whether each completion's answer is the true one by the text reader or, with the checker `math_verify`,
    by one of both.

    >>> are_correct(["#### 3", "#### 4"], ["3", "3"])
    [True, False]
    """
    check_checker(checker)
    by_text = [is_correct(text, truth) for text, truth in zip(completions, truths, strict=True)]
    if checker == "text" or all(by_text):
        return by_text
    pairs: list[tuple[str, str] | None] = []
    for is_right, text, truth in zip(by_text, completions, truths, strict=True):
        if is_right:
            pairs.append(None)
            continue
        formula = _as_formula(text, text[-_MAX_LENGTH:])
        true_formula = _as_formula(str(truth), _boxed(str(truth)))
        pairs.append((formula, true_formula))
    return _MATH_VERIFY.verdicts(pairs)


def _as_formula(text: str, otherwise: str) -> str:
    """The stated answer in a box, so that math-verify reads the same answer as the text reader."""
    answer = stated_answer(text)
    if answer is None:
        return otherwise
    return _boxed(answer)


def _boxed(answer: str) -> str:
    return rf"\boxed{{{answer.strip().strip('$')}}}"


class _MathVerify:
    """A process that compares answers, started at the first one. It is ended and started anew if an answer
    takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.num_too_long = 0

    def verdicts(self, pairs: Sequence[tuple[str, str] | None]) -> list[bool]:
        """Whether the answers of the pairs `(answer, truth)` are right; None stands for one that is known to
        be. An answer that takes too long is wrong, and a warning counts them."""
        verdicts: dict[tuple[str, str], bool] = {}
        with self._lock:
            end = time.monotonic() + _GROUP_S
            for pair in pairs:
                if pair is not None and pair not in verdicts:
                    verdicts[pair] = self._verdict(pair, end)
        return [pair is None or verdicts[pair] for pair in pairs]

    def _verdict(self, pair: tuple[str, str], end: float) -> bool:
        if max(map(len, pair)) > _MAX_LENGTH + len(r"\boxed{}"):
            return False
        limit = min(_ANSWER_S, end - time.monotonic())
        if limit > 0:
            connection = self._started()
            try:
                connection.send_bytes(json.dumps(pair).encode())
                if connection.poll(limit):
                    return connection.recv_bytes() == b"1"
            except (EOFError, OSError):
                pass  # the system has ended the process: its memory or time ran out
            self._end()
        self._count(pair)
        return False

    def _count(self, pair: tuple[str, str]) -> None:
        self.num_too_long += 1
        if f"{self.num_too_long}".strip("0") == "1":  # the 1st, 10th, 100th, …
            logger.warning(
                "checker math_verify: %d answers so far took more than %g s, or their group more than %g s, "
                "and count as wrong; the last one is %.80r",
                *(self.num_too_long, _ANSWER_S, _GROUP_S, pair[0]),
            )

    def _started(self) -> Connection:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        self._connection, theirs = Pipe()
        folders = [folder for folder in sys.path if isinstance(folder, str)]
        code = (
            f"import sys; sys.path[:] = {folders!r}\n"
            f"from turnwise.data.math_verify_process import main; main({theirs.fileno()})"
        )
        # In its own session, since only this process may get a terminal's Ctrl-C.
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        try:
            if self._connection.poll(_START_S) and self._connection.recv_bytes():
                return self._connection
        except (EOFError, OSError):
            pass  # the message says so
        self._end()
        raise NotAvailableError(
            "checker math_verify: the package math-verify can't be imported; the message above says why. "
            f"Install it with {install_hint('math')}"
        )

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


_MATH_VERIFY = _MathVerify()
