"""What lies below OpenEnv's messages: pings while nobody asks, packets, and who may ask a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from crude_openenv import SCHEMA
from messages import mentions

from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.openenv.connection import OpenEnvConnection
from turnwise.errors import ConfigError, EnvironmentFault
from turnwise.gateway.openenv_server import OpenEnvServer

LONGEST_S = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(routes: dict[str, Handler]) -> AsyncIterator[str]:
    """Serves at the yielded URL."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def served(make: Any, **options: Any) -> AsyncIterator[OpenEnvServer]:
    server = OpenEnvServer(make, "Lake", port=0, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def states(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for _ in socket:
        await socket.send_json({"type": "state", "data": {}})
    return socket


def test_a_client_answers_pings_while_the_model_samples() -> None:
    async def play() -> None:
        answered = asyncio.Event()

        async def pings(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse(autoping=False)
            await socket.prepare(request)
            await socket.receive()
            await socket.send_json({"type": "state", "data": {}})
            await socket.ping(b"there?")
            pong = await socket.receive()
            assert pong.type is aiohttp.WSMsgType.PONG
            answered.set()
            await socket.receive()
            await socket.send_json({"type": "state", "data": {"step_count": 3}})
            return socket

        async with answering({"/ws": pings}) as url:
            connection = OpenEnvConnection(url)
            await connection.open()
            await asyncio.wait_for(answered.wait(), LONGEST_S)
            assert (await connection.ask("state"))["data"] == {"step_count": 3}
            await connection.close()

    asyncio.run(play())


def test_a_connection_that_ended_between_two_questions_is_said_each_time() -> None:
    async def ends(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json({"type": "state", "data": {}})
        await socket.close(code=1011)
        return socket

    async def play() -> None:
        async with answering({"/ws": ends}) as url:
            connection = OpenEnvConnection(url)
            await connection.open()
            for _ in range(3):
                with pytest.raises(EnvironmentFault, match="ended the connection"):
                    await asyncio.wait_for(connection.ask("state"), LONGEST_S)
            await connection.close()

    asyncio.run(play())


class Slow(FrozenLakeEnv):
    """A step takes until `may_end`."""

    may_end = threading.Event()

    def step(self, action: str) -> Any:
        assert self.may_end.wait(LONGEST_S)
        return super().step(action)


def test_a_served_environment_answers_pings_while_it_plays() -> None:
    async def play() -> None:
        async with (
            served(Slow) as server,
            aiohttp.ClientSession(server.url) as client,
            client.ws_connect("/ws", autoping=False) as socket,
        ):
            await socket.send_json({"type": "reset", "data": {}})
            assert (await socket.receive_json())["type"] == "observation"
            await socket.send_json({"type": "step", "data": {"action": "Up"}})
            await socket.ping(b"there?")
            pong = await socket.receive(LONGEST_S / 2)
            assert pong.type is aiohttp.WSMsgType.PONG
            Slow.may_end.set()
            assert (await socket.receive_json())["type"] == "observation"

    asyncio.run(play())


def schema_of(*pieces: bytes) -> Handler:
    """Sends the schema piece by piece, each once the one before has been read."""

    async def schema(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.05)
        return response

    return schema


def test_a_schema_may_come_in_several_packets() -> None:
    content = json.dumps(SCHEMA).encode()

    async def read(*pieces: bytes) -> Any:
        async with answering({"/ws": states, "/schema": schema_of(*pieces)}) as url:
            connection = OpenEnvConnection(url)
            await connection.open()
            try:
                return await connection.schema()
            finally:
                await connection.close()

    assert asyncio.run(read(content[:20], content[20:50], content[50:])) == SCHEMA
    with pytest.raises(EnvironmentFault, match="/schema"):
        asyncio.run(read(content[:20], b" " * 17 * 2**20))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
    ],
)
def test_pages_of_browsers_play_nothing(headers: dict[str, str], status: int) -> None:
    async def ask() -> None:
        async with served(FrozenLakeEnv) as server, aiohttp.ClientSession(server.url) as client:
            every = {"Content-Type": "application/json"} | headers
            async with client.post("/reset", data=b"{}", headers=every) as answer:
                assert answer.status == status
            if status != 403:
                return
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await client.ws_connect("/ws", headers=headers)
            assert refused.value.status == 403
            assert (await client.get("/schema", headers=headers)).status == 403

    asyncio.run(ask())


def test_a_server_for_other_machines_has_any_name_but_still_no_pages() -> None:
    async def ask() -> None:
        async with served(FrozenLakeEnv, host="0.0.0.0") as server:
            port = server.url.rpartition(":")[2]
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                assert (await client.post("/reset", json={}, headers={"Host": "box"})).status == 200
                page = {"Host": "box", "Origin": "http://box"}
                assert (await client.post("/reset", json={}, headers=page)).status == 403

    asyncio.run(ask())


def test_a_body_that_comes_slowly_holds_up_nobody() -> None:
    async def play() -> None:
        async with served(FrozenLakeEnv) as server, aiohttp.ClientSession(server.url) as client:
            host, port = server.url.removeprefix("http://").split(":")
            _, slow = await asyncio.open_connection(host, int(port))
            head = f"POST /reset HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            slow.write(f"{head}Content-Length: 2\r\n\r\n{{".encode())
            await slow.drain()
            await (await client.get("/health")).json()
            for _ in range(3):
                answer = await asyncio.wait_for(client.post("/reset", json={}), LONGEST_S / 2)
                assert answer.status == 200
            slow.close()

    asyncio.run(play())


@pytest.mark.parametrize("port", [70000, -1])
def test_a_port_that_is_none_is_one_sentence(port: int) -> None:
    async def start() -> None:
        await OpenEnvServer(FrozenLakeEnv, "Lake", port=port).start()

    with pytest.raises(ConfigError) as refused:
        asyncio.run(start())
    assert mentions(str(refused.value), str(port), "--port")
