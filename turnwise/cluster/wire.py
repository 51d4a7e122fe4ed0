"""Messages between two processes."""

import os
import pickle
import struct
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

_WITH_BUFFERS = b"buf"
"""Prefix of the content of a message that buffers follow. Their number and sizes come next."""
_COUNT = struct.Struct("<I")


class Message(NamedTuple):
    """Bytes, and buffers that the content refers to by their order. Buffers aren't copied before they are
    sent, so they must stay as they are until then. Received ones are writable."""

    content: bytes
    buffers: Sequence[memoryview] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled with buffers out of band: who transports messages may share the memory of large arrays.
        return _unpickled, (self.content, [pickle.PickleBuffer(buffer) for buffer in self.buffers])

    def copied(self) -> "Message":
        """The message with its buffers in memory of their own."""
        return Message(self.content, [_copy(buffer) for buffer in self.buffers])


def _unpickled(content: bytes, buffers: Sequence[Any]) -> Message:
    return Message(content, [_copy(buffer) for buffer in buffers])


def _copy(buffer: Any) -> memoryview:
    return np.array(np.frombuffer(buffer, np.uint8)).data


class Wire(Protocol):
    """One end of what transports messages between two processes, usable from any thread."""

    def receive(self) -> Message:
        """The next message. Raises EOFError or OSError when the other end is closed."""

    def send(self, message: Message) -> None:
        """Sends a message. Its buffers may change as soon as this returns. Raises OSError if the other end is
        closed."""

    def close(self) -> None: ...


class ConnectionWire:
    """One end of a connection between two processes of one machine, or of several."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def receive(self) -> Message:
        content = self._connection.recv_bytes()
        if not content.startswith(_WITH_BUFFERS):
            return Message(content)
        start = len(_WITH_BUFFERS) + _COUNT.size
        [count] = _COUNT.unpack(content[len(_WITH_BUFFERS) : start])
        sizes = struct.Struct(f"<{count}Q")
        end = start + sizes.size
        buffers = [_read(self._connection, size) for size in sizes.unpack(content[start:end])]
        return Message(content[end:], buffers)

    def send(self, message: Message) -> None:
        content, buffers = message
        if buffers:
            sizes = struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
            content = b"".join((_WITH_BUFFERS, _COUNT.pack(len(buffers)), sizes, content))
        with self._lock:
            self._connection.send_bytes(content)
            for buffer in buffers:
                _write(self._connection, buffer)

    def close(self) -> None:
        self._connection.close()


def _read(connection: Connection, size: int) -> memoryview:
    # numpy's memory isn't filled with zeros first, as a bytearray's is.
    buffer = np.empty(size, np.uint8).data
    unread = buffer
    while unread:
        num_bytes = os.readv(connection.fileno(), [unread])
        if not num_bytes:
            raise EOFError
        unread = unread[num_bytes:]
    return buffer


def _write(connection: Connection, buffer: memoryview) -> None:
    unsent = buffer
    while unsent:
        num_bytes = os.write(connection.fileno(), unsent)
        unsent = unsent[num_bytes:]
