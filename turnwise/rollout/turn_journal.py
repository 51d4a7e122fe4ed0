"""`turns.jsonl` records every turn as soon as it is sampled, so that even an episode that never ended can be
replayed. A turn has two lines: first the new messages of its prompt, including results of tools, then the
sampled response with its tool calls. The first line of an episode also has the episode's task."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnwise.errors import DataError, counted
from turnwise.protocols import AgentLoop, SilentObserver, TurnPlace
from turnwise.rollout.observed import ObservedLoop
from turnwise.rollout.record import (
    Record,
    StateKeyWriter,
    TurnRecord,
    first_fault,
    written_task,
    written_turn,
)
from turnwise.runtime.rotating import RotatingFile, earlier_part
from turnwise.runtime.threads import DaemonThread
from turnwise.types import Message, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

_Agents = Callable[[Task], AgentLoop]
_MakeLine = Callable[[], Mapping[str, Any]]

_CLOSE_S = 10.0  # seconds to write what is left at the end of a run


class TurnJournal:
    """Appends lines to a RotatingFile in a thread, so that no episode waits for the disk. Lines too long for
    any file are left out. If the disk fails, the journal logs a warning and writes nothing more."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._name = path.name
        self._file: RotatingFile | None = RotatingFile(path, max_bytes)
        self._thread = DaemonThread("turn journal")
        self._num_left_out = 0

    def noted(self, agents: _Agents) -> _Agents:
        """Wraps `agents`, which returns a task's agent, so that all turns of the agents are written to the
        journal."""
        return lambda task: ObservedLoop(agents(task), partial(_EpisodeLines, self))

    def append(self, make_line: _MakeLine) -> None:
        """Appends a line; the thread calls `make_line`."""
        self._thread.start(self._append, make_line)

    def close(self) -> None:
        """Writes the remaining lines and closes the file."""
        self._thread.start(self._end)
        self._thread.end()
        self._thread.join(_CLOSE_S)

    def _append(self, make_line: _MakeLine) -> None:
        if self._file is not None:
            line = json.dumps(
                make_line(),
                ensure_ascii=False,
                separators=(",", ":"),
                default=lambda it: type(it).__name__,
            )
            self._write(self._file, line.encode(errors="replace") + b"\n")

    def _write(self, file: RotatingFile, line: bytes) -> None:
        try:
            if not file.write(line):
                self._num_left_out += 1
        except OSError as fault:
            logger.warning("%s records nothing more: %s", self._name, fault)
            self._file = None

    def _end(self) -> None:
        if self._num_left_out:
            left_out = counted(self._num_left_out, "line")
            logger.warning("%s has no room for %s; raise turn_journal_mb", self._name, left_out)
        if self._file is not None:
            self._file.close()
            self._file = None


class _EpisodeLines(SilentObserver):
    """Writes the turns of one attempt at an episode."""

    def __init__(self, journal: TurnJournal, task: Task, sibling: int) -> None:
        self._journal = journal
        self._task = task
        self._sibling = sibling
        self._is_begun = False

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None:
        head = self._head(place)
        if not self._is_begun:
            head |= {"task": written_task(self._task), "sibling": self._sibling}
        self._is_begun = True
        self._journal.append(lambda: head | {"messages": messages})

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        head = self._head(place) | {"turn": place.number}
        # A copy, since the agent changes the turn later. Its messages have a line of their own.
        snapshot = replace(turn, messages=())
        calls = {key: reply[key] for key in ("tool_calls", "call_errors") if reply.get(key)}
        self._journal.append(
            lambda: head | {"sampled": written_turn(snapshot, None, StateKeyWriter())} | calls
        )

    def _head(self, place: TurnPlace) -> dict[str, Any]:
        return {"episode": f"{self._task.id}/{self._sibling}", "context": place.context}


class _TurnLine(Record):
    episode: str
    context: int = 0
    task: Task | None = None
    sibling: int = 0
    turn: int = 0
    messages: Sequence[dict[str, Any]] = ()
    sampled: TurnRecord | None = None
    tool_calls: Sequence[dict[str, Any]] = ()


def is_turn_journal(path: Path) -> bool:
    """Whether a file begins like one that a `TurnJournal` has written."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b'{"episode":')


def read_turns(path: Path) -> tuple[list[Trajectory], list[str]]:
    """Returns a journal's episodes that have sampled turns, and sentences that say what is left out:
    unreadable lines, and turns whose earlier turns are lost. Raises DataError if there is no such file."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    lost: list[str] = []
    reading = _Reading()
    for line in _lines(path, lost):
        reading.read(line)
    if reading.cut:
        lost.append(
            f"turns of {counted(len(reading.cut), 'episode')} are left out, since earlier ones of them are "
            "gone"
        )
    return [episode for episode in reading.episodes if episode.turns], lost


def _lines(path: Path, lost: list[str]) -> Iterator[_TurnLine]:
    """The lines of both files of a journal. Appends a sentence to `lost` for each unreadable one."""
    for file in filter(Path.is_file, (earlier_part(path), path)):
        with file.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                if not text.strip():
                    continue
                try:
                    yield _TurnLine.model_validate_json(text)
                except ValidationError as error:
                    lost.append(f"{file.name}, line {number} is left out: {first_fault(error)}")


class _Reading:
    """The episodes of the lines read so far."""

    def __init__(self) -> None:
        self.episodes: list[Trajectory] = []
        self.cut: set[str] = set()
        """Names of episodes some of whose turns follow a lost one."""
        self._newest: dict[str, Trajectory] = {}  # the newest attempt at each episode
        self._last: dict[tuple[str, int], tuple[Turn, list[str]]] = {}
        """The newest turn of each context, and the ids of its calls."""

    def read(self, line: _TurnLine) -> None:
        if line.task is not None:
            self._newest[line.episode] = Trajectory(line.task, line.sibling, contexts_are="steps")
            self.episodes.append(self._newest[line.episode])
            self._last = {place: last for place, last in self._last.items() if place[0] != line.episode}
            return
        episode = self._newest.get(line.episode)
        if episode is None or (line.sampled and line.turn > len(episode.turns)):
            self.cut.add(line.episode)
        elif line.sampled:
            turn = line.sampled.made()
            episode.turns.append(turn)
            self._last[line.episode, line.context] = (turn, [str(call.get("id")) for call in line.tool_calls])
        elif (line.episode, line.context) in self._last:
            turn, call_ids = self._last[line.episode, line.context]
            turn.tool_results = _results(line.messages, call_ids)


def _results(messages: Sequence[Mapping[str, Any]], call_ids: Sequence[str]) -> tuple[str, ...] | None:
    """The results in the order of their calls, then those of calls that couldn't be read; None if there are
    none."""
    answers = [message for message in messages if message.get("role") == "tool"]
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    answers.sort(key=lambda answer: places.get(str(answer.get("tool_call_id")), len(places)))
    return tuple(answer.get("content", "") for answer in answers) or None
