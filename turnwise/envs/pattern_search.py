"""Searches a model's text with a user's regular expression, in a time that the text can't make endless.
Python can't interrupt its own search, which also holds Python's lock. A search that may take long is made in
another process, which a limit ends."""

import atexit
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from re import _constants as op, _parser  # type: ignore[attr-defined]  # there is no public way to a pattern's parts
from threading import Lock
from typing import Any

from turnwise.envs.pattern_program import FLAGS, groups_of

logger = logging.getLogger(__name__)

CPU_S = 0.5
"""Limit of one search in seconds of processor time."""
CHEAP_STEPS = 2e7
"""A search of at most this many estimated steps, about 0.1 s, is made in this process."""
_FEW = 8  # repetitions up to which a repeat counts as written out
_PROGRAM = Path(__file__).with_name("pattern_program.py")
_CATEGORIES = {
    (op.CATEGORY, op.CATEGORY_SPACE): re.compile(r"\s+"),
    (op.CATEGORY, op.CATEGORY_DIGIT): re.compile(r"\d+"),
    (op.CATEGORY, op.CATEGORY_WORD): re.compile(r"\w+"),
}
_ANCHORS = ((op.AT, op.AT_BEGINNING), (op.AT, op.AT_BEGINNING_STRING))
_ONE_CHARACTER = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)


def search(pattern: str, text: str) -> Sequence[str | None] | None:
    """The groups of the first match (the whole match if the pattern has no groups), None if there is no
    match, or if the search takes longer than `CPU_S`, which is logged."""
    if is_cheap(pattern, text):
        return groups_of(_compiled(pattern).search(text))
    try:
        return _searcher(os.getpid()).search(pattern, text)
    except TimeoutError:
        _warn(pattern, len(text))
        return None


def is_cheap(pattern: str, text: str) -> bool:
    """Whether a search takes at most `CHEAP_STEPS` steps, however unlucky the text is."""
    return _num_steps(_parsed(pattern), text.casefold()) <= CHEAP_STEPS


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, FLAGS)


@lru_cache(maxsize=64)
def _parsed(pattern: str) -> list[tuple[Any, Any]]:
    return _inlined(_parser.parse(pattern, FLAGS))


def _inlined(items: Any) -> list[tuple[Any, Any]]:
    """The pattern's parts in order, with those of groups in the groups' place."""
    parts: list[tuple[Any, Any]] = []
    for kind, value in items:
        if kind is op.SUBPATTERN:
            parts += _inlined(value[3])
        else:
            parts.append((kind, value))
    return parts


def _num_steps(parts: Sequence[tuple[Any, Any]], text: str) -> float:
    """The largest number of steps of a search. Each repeat looks at up to all of the text on each of the
    paths that led to it, and goes on wherever the literal text after it stands."""
    length = len(text) + 1
    paths = 1.0
    if not parts or parts[0] not in _ANCHORS:
        paths = float(_num_places(parts, text))
    steps = length + paths * len(parts)
    for index, (kind, value) in enumerate(parts):
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            min_repeats, max_repeats, repeated = value
            inner = _inlined(repeated)
            if any(part not in _ONE_CHARACTER for part, _ in inner):
                return math.inf
            if max_repeats <= _FEW:
                paths *= max_repeats - min_repeats + 1
                steps += paths * max_repeats * len(inner)
            elif len(inner) == 1:
                run = min(length, _longest_run(inner[0], text))
                steps += paths * run
                paths *= min(run, _num_places(parts[index + 1 :], text))
            else:
                return math.inf
        elif kind is op.BRANCH:
            branches = [_inlined(branch) for branch in value[1]]
            branch_parts = {part for part, _ in chain.from_iterable(branches)}
            if not branch_parts <= {*_ONE_CHARACTER, op.AT}:
                return math.inf
            paths *= len(branches)
            steps += paths * max(map(len, branches))
        elif kind not in (*_ONE_CHARACTER, op.AT):
            return math.inf
    return steps


def _num_places(parts: Sequence[tuple[Any, Any]], text: str) -> int:
    """The number of places in the text at which the parts may begin: where their first literal characters
    stand."""
    literal = ""
    for kind, value in parts:
        if kind is not op.LITERAL:
            break
        literal += chr(value)
    if not literal:
        return len(text) + 1
    return 1 + text.count(literal.casefold())


def _longest_run(part: tuple[Any, Any], text: str) -> float:
    """One more than the most characters in a row that the part of a pattern fits, if it is a category like
    `\\s`."""
    kind, value = part
    if kind is not op.IN or len(value) != 1 or value[0] not in _CATEGORIES:
        return math.inf
    runs = _CATEGORIES[value[0]].findall(text)
    return 1 + max(map(len, runs), default=0)


class _Searcher:
    """The process that makes costly searches, one at a time. It is started at the first, and again after one
    that was ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self._end)

    def search(self, pattern: str, text: str) -> list[str | None] | None:
        """Like `groups_of` the first match. Raises TimeoutError if the search is ended."""
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-I", "-S", str(_PROGRAM)]
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            # JSON escapes all that isn't ASCII, lone surrogates too.
            request = json.dumps({"pattern": pattern, "text": text, "cpu_s": CPU_S})
            print(request, file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                self._end()
                raise TimeoutError
            groups: list[str | None] | None = json.loads(line)
            return groups

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@lru_cache(maxsize=1)
def _searcher(process: int) -> _Searcher:
    """The searcher of this process; a forked process has its own."""
    return _Searcher()


@lru_cache(maxsize=64)
def _warn_once(pattern: str) -> None:
    logger.warning(
        "action_pattern %r: searches of more than %g s of computing are ended, and the response counts as "
        "having no action; write the pattern without repeats inside repeats, or lower max_tokens_per_step",
        pattern,
        CPU_S,
    )


def _warn(pattern: str, length: int) -> None:
    _warn_once(pattern)
    logger.info("action_pattern %r: no action was read from a response of %d characters", pattern, length)
