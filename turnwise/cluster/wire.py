"""Messages between two processes."""

import threading
from multiprocessing.connection import Connection


class Wire:
    """One end of a connection between two processes, usable from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def receive(self) -> bytes:
        """The next message. Raises EOFError or OSError when the other end is closed."""
        return self._connection.recv_bytes()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(message)

    def close(self) -> None:
        self._connection.close()
