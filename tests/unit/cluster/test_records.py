"""Log records of other processes say where they come from."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from turnwise.cluster.channel import Channel
from turnwise.cluster.messages import RECORD, Reply, dumps, pack
from turnwise.cluster.ray_settings import Outage, RayLines, RayRecords
from turnwise.cluster.wire import Message
from turnwise.runtime.console import WIDTH, open_console
from turnwise.runtime.stopwatch import Stopwatch


class Recorded:
    """A wire that gives these messages."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)

    def receive(self) -> Message:
        return self._messages.pop(0)


@pytest.mark.parametrize(
    ("origin", "text"), [("", "3 of 4 there"), ("replica 1 on b", "replica 1 on b: 3 of 4 there")]
)
def test_a_record_begins_with_its_origin(origin: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    record = logging.makeLogRecord(
        {"name": "turnwise.x", "levelno": logging.WARNING, "msg": "%d of %d there"}
    )
    record.args = (3, 4)
    wire = Recorded(Message(RECORD + dumps(record)), pack(Reply(value=1)))
    assert Channel(wire, Stopwatch(), origin).receive().value == 1  # type: ignore[arg-type]
    assert [logged.getMessage() for logged in caplog.records] == [text]


def test_records_of_ray_are_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("a library")
    library.addHandler(RayRecords())
    library.propagate = False
    library.warning("a node of %d is full", 3)
    [record] = caplog.records
    assert record.getMessage() == "ray: a node of 3 is full"
    assert record.levelno == logging.WARNING


def test_what_ray_prints_is_logged_without_colours_and_counters(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    lines = RayLines(stream)
    lines.write("of the run\n")
    text = "\x1b[33m(raylet)\x1b[0m it has ended\n    [state-dump] 7 calls\n\n"
    thread = threading.Thread(target=lines.write, args=(text,), name="ray_print_logs")
    thread.start()
    thread.join()
    assert [record.getMessage() for record in caplog.records] == ["ray: (raylet) it has ended"]
    assert stream.getvalue() == "of the run\n"


def test_calls_that_fail_in_a_row_are_logged_once_and_repeated_with_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses: list[float] = []
    outage = Outage(pauses.append)
    outage.end()
    for number in range(100):
        outage.note(RuntimeError(f"unavailable {number}"))
    assert outage.is_on and len(pauses) == 100 and min(pauses) > 0
    outage.end()
    outage.end()
    assert not outage.is_on
    assert len(caplog.records) == 2 and caplog.records[0].getMessage() == "ray: unavailable 0"
    outage.note(RuntimeError("again"))
    assert len(caplog.records) == 3


class Terminal(io.StringIO):
    """A stream with properties that a file lacks."""

    encoding = "latin-1"
    errors = "replace"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 7


def test_a_terminal_remains_one_under_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another answer tables would be as wide as in a file, and without colours."""
    lines = RayLines(Terminal())
    assert lines.isatty() and lines.writable() and lines.fileno() == 7
    assert (lines.encoding, lines.errors) == ("latin-1", "replace")
    lines.writelines(["a\n", "b\n"])
    lines.flush()
    assert lines.stream.getvalue() == "a\nb\n"
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout", lines)
    assert open_console().width == 50
    monkeypatch.setattr("sys.stdout", RayLines(io.StringIO()))
    assert open_console().width == WIDTH
