"""Clients that repeat, vanish or come too late: a delivered answer is trained once, another one never."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from scripted_gateway import CHAT, Scripted, scripted_gateway

RETRY = {"x-stainless-retry-count": "1"}
BODY = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}


async def request_and_leave(scripted: Scripted, reads: int = 0) -> None:
    """Sends a request, reads some bytes of the answer, and closes the connection."""
    url = scripted.gateway.url.removeprefix("http://")
    host, _, port = url.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {url}\r\nAuthorization: Bearer {scripted.session.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    if reads:
        await reader.readexactly(reads)
    else:
        while not scripted.server.num_waiting:
            await asyncio.sleep(0.001)
    writer.transport.abort()


def test_a_lost_client_s_answer_is_given_to_its_retry() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left"]) as scripted:
            scripted.server.gate.clear()
            await request_and_leave(scripted)
            await asyncio.sleep(0.05)
            retry = asyncio.ensure_future(scripted.post(BODY, headers=RETRY))
            await asyncio.sleep(0.05)
            scripted.server.gate.set()
            status, answer = await retry
            return status, answer, len(scripted.tree.turns), scripted.trained_turns()

    status, answer, num_turns, trained = asyncio.run(play())
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "left")
    assert (num_turns, trained) == (1, [0])


def test_an_answer_that_nobody_got_waits_for_its_request_and_is_not_trained_until_then() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left", "right"]) as scripted:
            scripted.server.gate.clear()
            await request_and_leave(scripted)
            await asyncio.sleep(0.05)
            scripted.server.gate.set()
            while not scripted.tree.turns:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            before = scripted.trained_turns()
            _, answer = await scripted.post(BODY)
            return before, answer["choices"][0]["message"]["content"], scripted.trained_turns()

    assert asyncio.run(play()) == ([], "left", [0])


def test_a_client_that_got_its_answer_and_asks_again_gets_a_sibling() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left", "right"]) as scripted:
            await request_and_leave(scripted, reads=40)
            answers = [await scripted.post(BODY)]
            return [a["choices"][0]["message"]["content"] for _, a in answers], scripted.trained_turns()

    assert asyncio.run(play()) == (["right"], [0, 1])


def test_a_retry_of_several_choices_waits_for_all_of_them() -> None:
    async def play() -> Any:
        async with scripted_gateway(lambda number: "abcdef"[number]) as scripted:
            scripted.server.gate.clear()
            body = BODY | {"n": 2}
            first = asyncio.ensure_future(scripted.post(body))
            while scripted.server.num_waiting < 2:
                await asyncio.sleep(0.001)
            retry = asyncio.ensure_future(scripted.post(body, headers=RETRY))
            await asyncio.sleep(0.05)
            scripted.server.gate.set()
            answers = [await first, await retry]
            texts = [[choice["message"]["content"] for choice in answer["choices"]] for _, answer in answers]
            return texts, len(scripted.tree.turns)

    [first, retry], num_turns = asyncio.run(play())
    assert first == retry and sorted(first) == ["a", "b"] and num_turns == 2


def test_an_ended_session_is_gone_and_its_running_requests_end() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left"]) as scripted:
            scripted.server.gate.clear()
            asking = asyncio.ensure_future(scripted.post(BODY))
            while not scripted.server.num_waiting:
                await asyncio.sleep(0.001)
            await scripted.sessions.end(scripted.session)
            return await asking, await scripted.post(BODY)

    for status, answer in asyncio.run(play()):
        assert (status, answer["error"]["code"]) == (410, "session_ended")


def test_too_many_requests_at_once_are_told_to_wait() -> None:
    async def play() -> Any:
        async with scripted_gateway(lambda number: "x", max_requests=2) as scripted:
            scripted.server.gate.clear()
            await request_and_leave(scripted)  # its answer is sampled all the same, and counts
            running = asyncio.ensure_future(scripted.chat("a"))
            while scripted.server.num_waiting < 2:
                await asyncio.sleep(0.001)
            url = scripted.gateway.url + CHAT
            async with scripted.http.post(url, json=BODY, headers=scripted.headers) as response:
                refused = response.status, response.headers["Retry-After"]
            scripted.server.gate.set()
            return refused, (await running)[0], (await scripted.chat("b"))[0]

    assert asyncio.run(play()) == ((429, "1"), 200, 200)
