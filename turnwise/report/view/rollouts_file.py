"""The lines of a `rollouts.jsonl` by step, found without decoding them, so that any step of a large file can
be read at once. The file may grow meanwhile."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import DataError

_STEP = re.compile(rb'\{"step": ?(\d{1,18})[,}]')
"""How a line begins that `write_record` wrote."""
_PIECE = 1 << 22
"""Bytes that are read at a time while steps are searched for."""
NO_STEP = -1


class _Run(NamedTuple):
    """Consecutive lines of one step: their place in the file, in bytes."""

    start: int
    stop: int
    num_lines: int


@dataclass(slots=True)
class RolloutsFile:
    """A `rollouts.jsonl` and the places of its steps. `scan` finds those that the file has by now. A last
    line without an end belongs to a step that is being written, or was cut by a kill: it is left out until
    it ends."""

    path: Path
    steps: dict[int, list[_Run]] = field(default_factory=dict)
    """The steps in the file's counting, from 0, in its order."""
    num_damaged: int = 0
    """Number of lines that are no JSON object with a step."""
    scanned: int = 0
    """Bytes of the whole lines that were read so far."""
    num_cuts: int = 0
    """How often a scan has begun anew, since the file had been cut. It may have grown again since."""
    _last_line: tuple[int, bytes] = (0, b"")
    """Where the last line begins that was read, and its digest."""

    def scan(self) -> bool:
        """Reads what has been appended, and returns whether it has whole lines. Begins anew if what was read
        is no longer there, as a resumed run cuts its file. Raises DataError if the file can't be read."""
        try:
            size = self.path.stat().st_size
            if self._is_cut(size):
                self.steps.clear()
                self.num_damaged = 0
                self.scanned = 0
                self._last_line = (0, b"")
                self.num_cuts += 1
            if size == self.scanned:
                return False
            start = self.scanned
            self._scan_from(start)
        except OSError as fault:
            raise DataError(f"{self.path} can't be read: {fault.strerror}") from fault
        return self.scanned > start

    def _is_cut(self, size: int) -> bool:
        """Whether the last line that was read isn't at its place any more."""
        if size < self.scanned:
            return True
        start, digest = self._last_line
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(self.scanned - start)
        return self.scanned > 0 and _digest(line) != digest

    def _scan_from(self, start: int) -> None:
        with self.path.open("rb") as file:
            file.seek(start)
            unfinished = b""
            while piece := file.read(_PIECE):
                *lines, unfinished = (unfinished + piece).split(b"\n")
                for line in lines:
                    self._add(line)
                if lines:
                    length = len(lines[-1]) + 1
                    self._last_line = (self.scanned - length, _digest(lines[-1] + b"\n"))

    def _add(self, line: bytes) -> None:
        start = self.scanned
        self.scanned += len(line) + 1
        if not line.strip():
            return
        step = _step_of(line)
        if step == NO_STEP:
            self.num_damaged += 1
            return
        runs = self.steps.setdefault(step, [])
        if runs and runs[-1].stop == start:
            first, _, num_lines = runs.pop()
            runs.append(_Run(first, self.scanned, num_lines + 1))
        else:
            runs.append(_Run(start, self.scanned, 1))

    def num_bytes(self, step: int) -> int:
        """The size of a step."""
        return sum(run.stop - run.start for run in self.steps[step])

    def lines(self, step: int) -> list[bytes]:
        """The lines of a step."""
        lines = []
        with self.path.open("rb") as file:
            for run in self.steps[step]:
                file.seek(run.start)
                lines += [line for line in file.read(run.stop - run.start).split(b"\n") if line.strip()]
        return lines

    def records(self, step: int) -> tuple[list[dict[str, Any]], int]:
        """The objects of a step's lines, and the number of lines that are damaged."""
        lines = self.lines(step)
        decoded = [_decoded(line) for line in lines]
        records = [record for record in decoded if record is not None]
        return records, len(lines) - len(records)


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _step_of(line: bytes) -> int:
    """The step of a line; `NO_STEP` if it has none."""
    match = _STEP.match(line)
    if match:
        if not line.rstrip().endswith(b"}"):
            return NO_STEP
        return int(match[1])
    record = _decoded(line)
    if record is None:
        return NO_STEP
    return int(record["step"])


def _decoded(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it isn't one of a trajectory, or is cut."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    has_turns = isinstance(record.get("turns"), list) and isinstance(record.get("task"), dict)
    return record if has_turns else None


def chosen_steps(file: RolloutsFile, budget_bytes: int) -> tuple[list[int], int]:
    """The steps of a file that are shown, and k: every k-th step, so that they have at most `budget_bytes`,
    with the first and the last one. k is 1 if all are shown."""
    steps = sorted(file.steps)
    total = sum(map(file.num_bytes, steps))
    every = max(1, -(-total // budget_bytes))
    chosen = steps[::every]
    if steps and steps[-1] not in chosen:
        chosen.append(steps[-1])
    return chosen, every
