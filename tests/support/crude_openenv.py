"""A server that speaks OpenEnv's protocol wrongly in one way, or rightly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web

TEXT = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "action": {"properties": {"move": TEXT, "metadata": {}}, "required": ["move"]},
    "observation": {"properties": {"board": TEXT, "score": {"type": "integer"}, "done": {}, "reward": {}}},
}


def observation(reward: Any = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    data = {"observation": {"board": "b", "score": 3, **fields}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, **details: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": f"message of {code}", "code": code, **details}}


@asynccontextmanager
async def crude_server(
    answers: dict[str, Any], schema: Any = SCHEMA, heard: list[Any] | None = None
) -> AsyncIterator[str]:
    """Serves at the yielded URL. `answers` has the reply to each type of message: an object, a text that is
    sent as it is, or None, which ends the connection without an answer."""

    async def socket(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for received in socket:
            assert received.type is WSMsgType.TEXT
            message = received.json()
            if heard is not None:
                heard.append(message)
            reply = answers.get(message["type"], {"type": "state", "data": {}})
            if reply is None:
                assert request.transport is not None
                request.transport.abort()
            elif isinstance(reply, str):
                await socket.send_str(reply)
            else:
                await socket.send_json(reply)
        return socket

    async def schemas(request: web.Request) -> web.Response:
        if isinstance(schema, str):
            return web.Response(text=schema, content_type="text/html")
        return web.json_response(schema)

    app = web.Application()
    app.router.add_get("/ws", socket)
    app.router.add_get("/schema", schemas)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
