"""The process in which math-verify compares answers. It imports nothing else of turnwise: whoever asks ends
it if it hangs."""

import json
import logging
import resource
import sys
from multiprocessing.connection import Connection

_MAX_CPU_S = 20
"""Seconds of one comparison after which the system ends this process, also if nobody waits for it any
more."""
_MAX_BYTES = 8 << 30


def main(descriptor: int) -> None:
    """Answers each request, the JSON list `[answer, truth]`, with `1` or `0`, until the other end is
    closed."""
    connection = Connection(descriptor)
    sys.stdout = sys.stderr
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    _limit(resource.RLIMIT_AS, _MAX_BYTES)
    connection.send_bytes(b"ready")
    while True:
        try:
            answer, truth = json.loads(connection.recv_bytes())
        except EOFError:
            return
        _limit(resource.RLIMIT_CPU, int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + _MAX_CPU_S)
        try:
            # Without limits of their own, which need SIGALRM, they also run outside a main thread.
            right = parse(truth, parsing_timeout=None)
            is_right = verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None)
        except Exception:  # boundary: what can't be compared isn't right
            is_right = False
        connection.send_bytes(b"1" if is_right else b"0")


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
