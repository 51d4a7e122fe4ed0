"""Requests as real clients sent them (texts made up): which response each continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scripted_gateway import CHAT, scripted_gateway

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "gateway_requests.json").read_text()
)
ANSWERED = {
    f"{case['client']}-{case['case']}": case["requests"]
    for case in CASES
    if all(request["path"] == CHAT and request["reply"] for request in case["requests"])
}
PARENTS: dict[str, list[int | None]] = {
    "agents-0": [None, 0, 1],
    "agents-2": [None, None, 0, None],
    "agents-6": [None, None],
    "agents-8": [None, 0, 1],
    "crew-0": [None, 0],
    "deep-0": [None, None, None, 0],
    "lc-0": [None, 0, 1],
    "lc-2": [None, 0, 1],
    "mini-0": [None, 0, 0],
    "openai-0": [None, 0],
    "pyd-0": [None, 0],
    "pyd-2": [None, None],
    "pyd-3": [None, 0, 1],
    "pyd-4": [None, None],
    "smol-0": [None, None],
    "smol-1": [None, None],
}
"""The response that each request of a case with several requests continues; None = it starts a context."""


def text_of(reply: Mapping[str, Any]) -> str:
    """The model's text of a recorded reply."""
    text = reply.get("content") or ""
    if reply.get("reasoning"):
        text = f"<think>\n{reply['reasoning']}\n</think>\n\n{text}"
    for name, arguments in reply.get("calls") or ():
        called = arguments if isinstance(arguments, str) else json.dumps(arguments)
        text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {called}}}\n</tool_call>'
    return text


def played(name: str) -> tuple[list[int], list[int | None], int]:
    """Statuses, parents and the number of trained responses."""
    requests = ANSWERED[name]

    async def play() -> Any:
        replies = [text_of(request["reply"]) for request in requests]
        async with scripted_gateway(replies, models={"*": "trained"}) as scripted:
            statuses = []
            for request in requests:
                body = {**request["body"], "stream": False, "stream_options": None}
                status, _ = await scripted.post(body)
                statuses.append(status)
            return statuses, [turn.parent for turn in scripted.tree.turns], len(scripted.trained_turns())

    return asyncio.run(play())


@pytest.mark.parametrize("name", sorted(ANSWERED))
def test_the_response_that_each_request_continues(name: str) -> None:
    statuses, parents, num_trained = played(name)
    assert statuses == [200] * len(ANSWERED[name])
    assert parents == PARENTS.get(name, [None])
    assert num_trained == len(parents)


def test_every_case_with_several_requests_is_told() -> None:
    assert PARENTS.keys() == {name for name, requests in ANSWERED.items() if len(requests) > 1}
