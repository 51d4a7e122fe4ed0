"""The connection of one episode to an OpenEnv server: a schema over HTTP, messages over a WebSocket."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from turnwise.envs.packages import needs
from turnwise.errors import EnvironmentFault
from turnwise.runtime.websocket_frames import WebSocketFrames, is_text

MAX_MESSAGE_BYTES = 16 * 2**20
"""A longer reply ends the episode: no model reads it."""
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 0.5
"""Seconds between two tries to get a place at a server that has none."""
NO_PLACE = "CAPACITY_REACHED"
_UNUSABLE = ("FACTORY_ERROR", "SESSION_ERROR")

Json = dict[str, Any]


class OpenEnvConnection:
    """Talks to the server at `url` (http or https). Each method raises EnvironmentFault, which names the URL,
    if the server can't be reached, ends the connection, or answers in another form."""

    def __init__(self, url: str) -> None:
        with needs("aiohttp", "gateway"):
            import aiohttp
        self._aiohttp = aiohttp
        self.url = url.rstrip("/")
        self._session: Any = None
        self._socket: Any = None
        self._frames: WebSocketFrames | None = None

    @property
    def is_open(self) -> bool:
        return self._frames is not None

    async def open(self) -> None:
        """Connects, and waits until the server has a place for another episode."""
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(self.close)
            await self._place()
            on_error.pop_all()

    async def _place(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            await self._connect()
            # A server says that it is full only in answer to the first message.
            reply = await self.ask("state")
            code = error_code(reply)
            if code in _UNUSABLE:
                raise EnvironmentFault(f"{self.url} can't make an environment: {error_text(reply)}")
            if code != NO_PLACE:
                return
            await self.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _connect(self) -> None:
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        self._session = self._aiohttp.ClientSession(timeout=timeout)
        try:
            self._socket = await self._session.ws_connect(
                f"{self.url}/ws", max_msg_size=MAX_MESSAGE_BYTES, autoping=True
            )
        except (self._aiohttp.ClientError, OSError, TimeoutError) as fault:
            raise EnvironmentFault(
                f"{self.url}/ws can't be opened ({_described(fault)}); is an OpenEnv server at {self.url}?"
            ) from fault
        # Servers ping, and end a connection that doesn't answer, also while the model samples.
        self._frames = WebSocketFrames(self._socket)

    async def schema(self) -> Json:
        """The answer of `/schema`: JSON schemas of `action` and `observation`."""
        place = f"{self.url}/schema"
        try:
            async with self._session.get(place) as response:
                status = response.status
                content = await _content(response)
        except (self._aiohttp.ClientError, OSError, TimeoutError) as fault:
            raise EnvironmentFault(f"{place} can't be read: {_described(fault)}") from fault
        try:
            schema = json.loads(content)
        except ValueError:
            schema = None
        is_schema = isinstance(schema, dict) and isinstance(schema.get("action"), dict)
        if status != 200 or not is_schema:
            raise EnvironmentFault(
                f"{place} answers {status} with {content[:60]!r}, no JSON schemas; name the address of an "
                "OpenEnv server"
            )
        assert isinstance(schema, dict)
        return schema

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Json:
        """Sends a message, and returns the reply: `{"type": …, "data": {…}}`."""
        message: Json = {"type": kind}
        if data is not None:
            message["data"] = data
        assert self._frames is not None
        try:
            await self._socket.send_str(json.dumps(message))
            received = await self._frames.next()
        except (self._aiohttp.ClientError, OSError) as fault:
            raise EnvironmentFault(f"{self.url} ended the connection ({_described(fault)})") from fault
        if received.type is self._aiohttp.WSMsgType.ERROR:
            raise EnvironmentFault(f"{self.url} sent what can't be read: {_described(received.data)}")
        if not is_text(received):
            code = self._socket.close_code
            raise EnvironmentFault(f"{self.url} ended the connection in answer to {kind} (code {code})")
        try:
            reply = json.loads(received.data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict) or "type" not in reply:
            raise EnvironmentFault(
                f"{self.url} answers {kind} with {received.data[:80]!r}; a reply is "
                '{"type": …, "data": {…}}'
            )
        return reply

    async def close(self) -> None:
        """Ends the session. Closing again changes nothing."""
        socket = self._socket
        session = self._session
        frames = self._frames
        self._socket = None
        self._session = None
        self._frames = None
        if frames is not None:
            await frames.close()
        if socket is not None and not socket.closed:
            try:
                await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
            except (self._aiohttp.ClientError, OSError):
                pass  # a server that is gone has closed it
        if session is not None:
            await session.close()


async def _content(response: Any) -> bytes:
    """The body of a response to its end, or what comes until it is longer than a message may be."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_MESSAGE_BYTES:
            break
    return bytes(content)


def error_code(reply: Mapping[str, Any]) -> str:
    """The code of an error; empty if the reply is none."""
    if reply["type"] != "error":
        return ""
    return str(reply["data"].get("code", "unknown"))


def error_text(reply: Mapping[str, Any]) -> str:
    """The code and message of an error, with the fields at fault."""
    data = reply["data"]
    text = f"{error_code(reply)}: {data.get('message', 'no message')}"
    for fault in data.get("errors") or ():
        if isinstance(fault, dict):
            place = ".".join(map(str, fault.get("loc", ())))
            text += f"; {place}: {fault.get('msg', '')}"
    return text[:500]


def _described(fault: object) -> str:
    return f"{type(fault).__name__}: {fault}".rstrip(": ")[:200]
