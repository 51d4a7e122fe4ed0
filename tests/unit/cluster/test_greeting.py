"""Launched processes connect to the first one, whoever else does."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from turnwise.cluster.greeting import greetings
from turnwise.errors import WorkerError

KEY = b"a key of this run"


def test_silent_and_wrong_connections_neither_block_nor_end_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        address = server.getsockname()
        taken = thread.submit(greetings, server, KEY, 2, 60.0)
        silent = [socket.create_connection(address) for _ in range(3)]
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\0\0\0\5hello", b"\0\0\0\2ok" * 50):
            with socket.create_connection(address) as wrong:
                wrong.sendall(words)
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            Client(address, authkey=b"another key")
        for rank in (1, 2):
            Client(address, authkey=KEY).send(("rank", rank))
        assert sorted(words for _, words in taken.result()) == [("rank", 1), ("rank", 2)]
        for connection in silent:
            connection.close()


def test_missing_processes_end_it_with_their_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = threading.Thread(target=lambda: Client(server.getsockname(), authkey=KEY).send(1))
        one.start()
        with pytest.raises(WorkerError, match=r"1 of 3 launched processes have connected .*within 0\.5 s"):
            greetings(server, KEY, 3, 0.5)
        one.join()
