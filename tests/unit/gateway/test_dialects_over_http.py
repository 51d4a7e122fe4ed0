"""Responses and messages over real HTTP on loopback: errors in their own form, streams, counts, and a
conversation that changes its dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from chat_messages import user
from gateway_choices import events_of
from scripted_gateway import CHAT, Scripted, scripted_gateway

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
REPLY = (
    '<think>\nhm\n</think>\n\nLet me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "policy",
        "messages": [user("go")],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    RESPONSES: {"model": "policy", "input": "go", "tools": [{"type": "function", **FUNCTION}]},
    MESSAGES: {
        "model": "policy",
        "messages": [user("go")],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    },
}
"""The same request in each dialect."""


def sent_back(path: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The request that follows the answer, with the tool's result."""
    request = ASKED[path]
    if path == CHAT:
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
        return {**request, "messages": [*request["messages"], message, result]}
    if path == RESPONSES:
        call_id = answer["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "2"}
        return {**request, "input": [user("go"), *answer["output"], result]}
    blocks = answer["content"]
    results = [{"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "2"}]
    said = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    return {**request, "messages": [*request["messages"], *said]}


@pytest.mark.parametrize("path", ASKED)
def test_the_same_request_has_the_same_prompt_in_each_dialect_and_its_answer_continues_it(path: str) -> None:
    async def play() -> Any:
        async with scripted_gateway([REPLY, REPLY, "done"]) as scripted:
            await scripted.post(ASKED[CHAT])
            _, answer = await scripted.post(ASKED[path], path)
            status, _ = await scripted.post(sent_back(path, answer), path)
            return status, scripted.tree.turns, scripted.trained_turns()

    status, turns, trained = asyncio.run(play())
    assert status == 200
    assert turns[0].prompt_ids.tolist() == turns[1].prompt_ids.tolist()
    assert [turn.parent for turn in turns] == [None, None, 1] and trained == [0, 1, 2]


def test_a_conversation_may_change_its_dialect() -> None:
    async def play() -> Any:
        async with scripted_gateway([REPLY, "done"]) as scripted:
            await scripted.post(ASKED[RESPONSES], RESPONSES)
            call = {"type": "tool_use", "id": "x", "name": "add", "input": {"a": 1}}
            blocks = [{"type": "text", "text": "Let me see."}, call]
            await scripted.post(sent_back(MESSAGES, {"content": blocks}), MESSAGES)
            return scripted.tree.turns

    assert [turn.parent for turn in asyncio.run(play())] == [None, 0]


async def stream(scripted: Scripted, path: str) -> tuple[str, bytes]:
    headers = {"Content-Type": "application/json", **scripted.headers}
    content = json.dumps({**ASKED[path], "stream": True})
    url = scripted.gateway.url + path
    async with scripted.http.post(url, data=content, headers=headers) as response:
        return response.content_type, await response.read()


@pytest.mark.parametrize(("path", "last"), [(RESPONSES, "response.completed"), (MESSAGES, "message_stop")])
def test_a_stream_is_comments_then_events(path: str, last: str) -> None:
    async def play() -> Any:
        async with scripted_gateway([REPLY]) as scripted:
            scripted.server.gate.clear()
            asyncio.get_running_loop().call_later(0.1, scripted.server.gate.set)
            result = await stream(scripted, path)
            return result, scripted.trained_turns()

    (content_type, content), trained = asyncio.run(play())
    assert content_type == "text/event-stream" and content.startswith(b": keep-alive")
    events = events_of([content])
    assert events[-1][0] == last and trained == [0]


def test_a_count_is_the_prompt_s_and_no_turn() -> None:
    async def play() -> Any:
        async with scripted_gateway([REPLY]) as scripted:
            _, counted = await scripted.post(ASKED[MESSAGES], COUNT)
            before = len(scripted.tree.turns)
            _, answer = await scripted.post(ASKED[MESSAGES], MESSAGES)
            return counted, before, answer

    counted, before, answer = asyncio.run(play())
    assert before == 0 and counted["input_tokens"] == answer["usage"]["input_tokens"]


def test_errors_have_the_form_of_the_path_s_dialect() -> None:
    long = "x" * 20_000

    async def play() -> Any:
        async with scripted_gateway([]) as scripted:
            wrong = {"Authorization": "Bearer no"}
            return [
                await scripted.post(ASKED[RESPONSES], RESPONSES, wrong),
                await scripted.post(ASKED[MESSAGES], MESSAGES, wrong),
                await scripted.post(ASKED[RESPONSES] | {"input": long}, RESPONSES),
                await scripted.post(ASKED[MESSAGES] | {"messages": [user(long)]}, MESSAGES),
                await scripted.post(ASKED[MESSAGES] | {"model": "other"}, MESSAGES),
                await scripted.post(ASKED[MESSAGES] | {"tools": [{"name": 3}]}, MESSAGES),
                await scripted.post(
                    ASKED[RESPONSES] | {"tools": [ASKED[RESPONSES]["tools"][0]] * 2}, RESPONSES
                ),
            ]

    (_, key), (_, key_there), (_, length), (_, length_there), *others = asyncio.run(play())
    assert key["error"]["code"] == "invalid_api_key"
    assert (key_there["type"], key_there["error"]["type"]) == ("error", "authentication_error")
    assert length["error"]["code"] == "context_length_exceeded"
    assert length_there["error"]["message"].startswith("prompt is too long")
    assert [status for status, _ in others] == [404, 400, 400]


def test_strict_refuses_tools_of_the_server() -> None:
    async def play() -> Any:
        async with scripted_gateway([], is_strict=True) as scripted:
            return await scripted.post(ASKED[RESPONSES] | {"tools": [{"type": "web_search"}]}, RESPONSES)

    status, answer = asyncio.run(play())
    assert status == 400 and "web_search" in answer["error"]["message"]


def test_the_billing_line_splits_nothing() -> None:
    async def play() -> Any:
        async with scripted_gateway([REPLY, "done"]) as scripted:
            answer: Any = None
            for number in range(2):
                request = ASKED[MESSAGES] if answer is None else sent_back(MESSAGES, answer)
                line = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
                system = [line, {"type": "text", "text": "Be brief."}]
                _, answer = await scripted.post({**request, "system": system}, MESSAGES)
            return scripted.tree.turns, scripted.session.counts

    turns, counts = asyncio.run(play())
    assert [turn.parent for turn in turns] == [None, 0]
    assert counts["removed/x-anthropic-billing-header"] == 2


@pytest.mark.parametrize("path", ASKED)
def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_text(path: str) -> None:
    async def play() -> Any:
        async with scripted_gateway(["done"]) as scripted:
            whole = json.dumps(ASKED[path]).replace('"go"', '"\\ud83d\\ude00"')
            half = whole.replace("\\ude00", "")
            return [await scripted.post(content.encode(), path) for content in (half, whole)]

    assert [status for status, _ in asyncio.run(play())] == [400, 200]
