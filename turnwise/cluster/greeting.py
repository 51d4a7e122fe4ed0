"""Takes the connections of other processes that know a key, whoever else connects to the same port."""

import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from socket import socket
from typing import Any

from turnwise.errors import WorkerError

_LOOK_S = 0.05  # seconds between two looks whether somebody has greeted
_NOT_OURS = (OSError, EOFError, AuthenticationError, AssertionError, ValueError)
"""How a connection ends on which somebody else talks: closed, or without the answer that `multiprocessing`
gives."""

Greeting = tuple[Connection, Any]
"""A connection and the first object that came through it."""


def greetings(
    server: socket,
    key: bytes,
    count: int,
    timeout_s: float,
) -> list[Greeting]:
    """The first `count` connections that were made by `multiprocessing.connection.Client` with this `key` and
    have sent an object. Each is heard in a thread of its own: a silent one blocks no other, and one that
    doesn't know the key is closed. Raises WorkerError if there are fewer after `timeout_s`."""
    heard: SimpleQueue[Greeting] = SimpleQueue()
    taken: list[Greeting] = []
    deadline = time.monotonic() + timeout_s
    server.settimeout(_LOOK_S)
    while len(taken) < count:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"{len(taken)} of {count} launched processes have connected to rank 0 within {timeout_s:g} "
                "s; what the others wrote above says why they didn't"
            )
        with suppress(TimeoutError):
            connection = Connection(server.accept()[0].detach())
            threading.Thread(
                target=_hear, args=(connection, key, heard), name="greeting", daemon=True
            ).start()
        while not heard.empty():
            taken.append(heard.get())
    return taken


def _hear(connection: Connection, key: bytes, heard: "SimpleQueue[Greeting]") -> None:
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        heard.put((connection, connection.recv()))
    except _NOT_OURS:
        connection.close()
