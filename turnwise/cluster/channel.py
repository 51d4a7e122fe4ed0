"""The calling end of a connection to a process of workers."""

import logging
from typing import Any

from turnwise.cluster.messages import DONE, RECORD, Reply, loads, unpack
from turnwise.cluster.wire import Message, Wire
from turnwise.runtime.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


class Channel:
    """Sends calls to a process and receives its answers. Log records and progress that come before an answer
    are passed on to the log and the stopwatch of this process; if `origin` names the other process, its
    records begin with that."""

    def __init__(self, wire: Wire, stopwatch: Stopwatch, origin: str = "") -> None:
        self._wire = wire
        self.stopwatch = stopwatch
        self._origin = origin

    def send(self, message: Message) -> None:
        """Sends a packed call. Raises OSError if the process has ended."""
        self._wire.send(message)

    def receive(self) -> Any:
        """The next answer. Raises EOFError or OSError if the process has ended."""
        return unpack(self.receive_packed())

    def receive_packed(self) -> Message:
        """The next answer, still packed."""
        while True:
            message = self._wire.receive()
            content = message.content
            if content.startswith(RECORD):
                _log(content.removeprefix(RECORD), self._origin)
            elif content.startswith(DONE):
                self.stopwatch.did_batch(int(content.removeprefix(DONE)))
            else:
                return message

    def value(self, reply: Reply, track_prefix: str = "") -> Any:
        """The value of an answer, or raises its error. What the process's stopwatch noted is added to the
        stopwatch here."""
        self.note(reply, track_prefix)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def note(self, reply: Reply, track_prefix: str = "") -> None:
        """Adds what the process's stopwatch noted to the stopwatch here."""
        for track, name, started, ended, details in reply.spans:
            self.stopwatch.add(track_prefix + track, name, started, ended, **details)
        self.stopwatch.did_tokens(reply.tokens)
        self.stopwatch.num_sampled += reply.num_sampled

    def close(self) -> None:
        self._wire.close()


def _log(pickled: bytes, origin: str) -> None:
    """Logs a record of the other process in this one."""
    try:
        record: logging.LogRecord = loads(pickled)
    except (
        Exception
    ) as error:  # boundary: its `extra` may hold objects of classes that can't be imported here
        logger.warning("A log record of another process can't be read: %s", error)
    else:
        if origin:
            record.msg = f"{origin}: {record.getMessage()}"
            record.args = None
        logging.getLogger(record.name).handle(record)
