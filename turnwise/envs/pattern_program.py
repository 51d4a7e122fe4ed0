"""The program of the process that searches with costly patterns (`pattern_search.py`). It reads JSON lines
`{"pattern", "text", "cpu_s"}` and answers each with the groups of the first match, or null. At the limit the
system ends the process, in the middle of a search."""

import json
import re
import signal
import sys
from typing import Any

FLAGS = re.IGNORECASE | re.DOTALL


def groups_of(match: re.Match[str] | None) -> list[str | None] | None:
    """The groups of a match, or the whole match if the pattern has none."""
    if match is None:
        return None
    return list(match.groups() or (match.group(),))


def answer(request: dict[str, Any]) -> list[str | None] | None:
    signal.setitimer(signal.ITIMER_VIRTUAL, request["cpu_s"])
    try:
        pattern = re.compile(request["pattern"], FLAGS)
        return groups_of(pattern.search(request["text"]))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


if __name__ == "__main__":
    for line in sys.stdin:
        groups = answer(json.loads(line))
        print(json.dumps(groups), flush=True)
