"""Requests of real clients with a random part replaced are read, or refused with a sentence: nothing else is
raised."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from gateway_choices import choice_of

from turnwise.chat.message_keys import canonical, read_history, read_tools
from turnwise.errors import RequestError
from turnwise.gateway.dialects import COUNTERS, DIALECTS

FILE = Path(__file__).parents[2] / "data" / "gateway_requests.json"
REQUESTS = [request for case in json.loads(FILE.read_text()) for request in case["requests"]]
ENDPOINTS: Mapping[str, Any] = {**DIALECTS, **COUNTERS}
VALUES = (
    None,
    True,
    0,
    -1,
    3,
    1.5,
    1e400,
    "",
    "x",
    [],
    [None],
    ["x"],
    [[]],
    {},
    {"type": "x"},
    {"a": {"b": []}},
)
NUM_DAMAGED = 600


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a JSON value with each of its keys."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from places(value[key])


def damaged(rng: random.Random, body: Mapping[str, Any]) -> dict[str, Any]:
    changed = deepcopy(dict(body))
    for _ in range(rng.choice((1, 1, 1, 2))):
        container, key = rng.choice(list(places(changed)))
        kind = rng.random()
        if kind < 0.2 and isinstance(container, dict):
            container.pop(key)
        elif kind < 0.3 and isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        else:
            container[key] = deepcopy(rng.choice(VALUES))
    return changed


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_damaged_request_is_read_or_refused_with_a_sentence(path: str) -> None:
    rng = random.Random(path)
    bodies = [request["body"] for request in REQUESTS if request["path"] == path]
    num_refused = 0
    for _ in range(NUM_DAMAGED):
        body = damaged(rng, rng.choice(bodies))
        try:
            request = ENDPOINTS[path].read(body)
            read_history(request.messages)
            canonical(read_tools(request.tools), "tools")
        except RequestError as fault:
            num_refused += 1
            assert len(str(fault)) > 10
        except Exception as fault:
            raise AssertionError(f"{fault!r} for {json.dumps(body)}") from fault
    assert NUM_DAMAGED > num_refused > 0


@pytest.mark.parametrize("path", DIALECTS)
def test_what_was_read_can_be_answered(path: str) -> None:
    """An answer echoes parts of the request."""
    rng = random.Random(path)
    bodies = [request["body"] for request in REQUESTS if request["path"] == path]
    choice = choice_of("see", thinking="hm", calls=[("add", {"a": 1})])
    for _ in range(NUM_DAMAGED // 5):
        body = damaged(rng, rng.choice(bodies))
        try:
            request = DIALECTS[path].read(body)
            read_tools(request.tools)
        except RequestError:
            continue
        json.dumps(DIALECTS[path].response(request, [choice], "turn-0"))
        assert b"".join(DIALECTS[path].events(request, [choice], "turn-0"))
