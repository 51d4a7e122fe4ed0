"""Receives the frames of a WebSocket of aiohttp all the time, a client's or a server's."""

import asyncio
from typing import Any

MAX_WAITING = 4
"""Frames that wait to be read; further ones wait in the network, and pings with them."""


class WebSocketFrames:
    """The frames of a socket. aiohttp answers a ping only while somebody receives, so a task receives even
    while nobody waits for a frame. Create it in a running event loop."""

    def __init__(self, socket: Any) -> None:
        self._frames: asyncio.Queue[Any] = asyncio.Queue(MAX_WAITING)
        self._last: Any = None
        self._task = asyncio.create_task(_receive(socket, self._frames))

    async def next(self) -> Any:
        """The next frame. The first one that isn't a text is the last one: it is returned again and again."""
        if self._last is None:
            frame = await self._frames.get()
            if is_text(frame):
                return frame
            self._last = frame
        return self._last

    async def close(self) -> None:
        """Ends the task, so that another may receive. The socket stays open."""
        if self._task.cancel():
            await asyncio.wait([self._task])


def is_text(frame: Any) -> bool:
    """Whether a frame is a text, and not the end of the connection, an error or bytes."""
    is_it: bool = frame.type.name == "TEXT"
    return is_it


async def _receive(socket: Any, frames: asyncio.Queue[Any]) -> None:
    is_open = True
    while is_open:
        frame = await socket.receive()
        is_open = is_text(frame)
        await frames.put(frame)
