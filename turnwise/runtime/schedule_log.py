"""Records what timing decided in an asynchronous run, so that `turnwise train --replay` can repeat the run:
which requests each engine step admitted into which slot, between which steps the weights changed, which
groups each batch contained, and with which version of the tasks' state each group was admitted. The rest
follows from the config (`docs/design/asynchronous.md`)."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import DataError
from turnwise.runtime.jsonl import read_jsonl

Admissions = tuple[tuple[str, int], ...]
"""`(request id, slot)` of each request that an engine step admits, in order."""


class EngineSteps(NamedTuple):
    """`num_steps` consecutive steps of the inference engine. The first one admits `admissions`, the others no
    requests."""

    admissions: Admissions
    num_steps: int


class BatchGroups(NamedTuple):
    """Indices of groups. A batch trains on `parts`; `rejected` groups failed or were filtered out since the
    last batch."""

    parts: list[list[int]]
    rejected: list[int]


class ScheduleLog:
    """Writes a run's events to `file`. If the run follows a `recorded` one, reads what that run did. Raises
    DataError past the end of the record, and where the two runs differ.

    >>> schedule_log = ScheduleLog()
    >>> schedule_log.is_followed, schedule_log.batch(0)
    (False, None)
    """

    def __init__(self, file: Path | None = None, recorded: Path | None = None) -> None:
        self.is_followed = recorded is not None
        self._recorded = recorded
        self._file = file.open("a", encoding="utf-8") if file else None
        self._pending = EngineSteps((), 0)  # steps that have happened and aren't written yet
        self._num_batches = 0  # batches that `record_batch` has recorded
        self._conditions: dict[str, Any] = {}
        self._batches: dict[int, BatchGroups] = {}
        self._validations: set[int] = set()
        """Numbers of batches after which the record has a complete validation."""
        self._task_versions: dict[int, int] = {}
        engine_events: list[dict[str, Any]] = []
        events = [] if recorded is None else _read(recorded)
        for event in events:
            if "on" in event:
                # Later ones are of runs that wrote into the same file; the first run is the recorded one.
                self._conditions = self._conditions or event["on"]
            elif "batch" in event:
                self._batches[event["batch"]] = _decode_batch(event)
            elif "validation" in event:
                self._validations.add(event["validation"])
            elif "task" in event:
                self._task_versions[event["task"]] = event["version"]
            else:
                engine_events.append(event)
        self._events = map(_decode, engine_events)
        self._next = next(self._events, None)
        """The next engine steps, or the version of the next weight update."""

    # What is to happen

    @property
    def admissions(self) -> Admissions | None:
        """Admissions of the next engine step. None if a weight update comes first, at the record's end, or
        without a record."""
        if isinstance(self._next, EngineSteps):
            return self._next.admissions
        return None

    @property
    def update(self) -> int | None:
        """The version of the weight update due now; None if engine steps come first. Raises DataError at the
        record's end."""
        if self._next is None:
            raise self._end()
        if isinstance(self._next, EngineSteps):
            return None
        return self._next

    def batch(self, step: int) -> BatchGroups | None:
        """The recorded groups of the batch of a `step`; None without a record. Raises DataError if it has no
        such batch."""
        if not self.is_followed:
            return None
        if step not in self._batches:
            raise self._end()
        return self._batches[step]

    def rejects(self, index: int) -> bool:
        """Whether a batch of the record lists this group as rejected."""
        return any(index in groups.rejected for groups in self._batches.values())

    def check(self, index: int, is_rejected: bool) -> None:
        """Raises DataError if group `index` is rejected here and was trained on in the record, or the other
        way round."""
        if is_rejected and self._trains_on(index):
            difference = f"was trained on in {self._recorded} and is rejected here"
        elif not is_rejected and self.rejects(index):
            difference = f"was rejected in {self._recorded} and would be trained on here"
        else:
            return
        raise DataError(
            f"group {index} {difference}, so there is no more to repeat: an environment, a reward or a time "
            "limit answered otherwise than it did then"
        )

    def _trains_on(self, index: int) -> bool:
        parts = chain.from_iterable(groups.parts for groups in self._batches.values())
        return any(index in part for part in parts)

    def task_version(self, index: int) -> int | None:
        """The version of the tasks' state with which group `index` was admitted; 0 if none is recorded. None
        without a record, or if `index` is above all that have a version: since versions only rise, the
        recorded run never admitted this group."""
        if not self.is_followed or index > max(self._task_versions, default=index):
            return None
        return self._task_versions.get(index, 0)

    def begin_validation(self) -> None:
        """Raises DataError if the record has no complete validation at this point."""
        # Old records without conditions have no validations either.
        if self._conditions and self._num_batches not in self._validations:
            raise DataError(
                f"{self._recorded} holds no complete validation after {self._num_batches} batches: its run "
                "ended there, or had another eval_steps; there is no more to repeat"
            )

    def _end(self) -> DataError:
        return DataError(
            f"{self._recorded} ends after {len(self._batches)} batches, where its run ended; there is no "
            "more to repeat"
        )

    # What has happened

    def begin(self, conditions: Mapping[str, Any]) -> None:
        """Writes the `conditions` on which results depend besides the config. Raises DataError if one differs
        in the record."""
        differences: list[str] = []
        for name, recorded in self._conditions.items():
            current = conditions.get(name)
            if current != recorded:
                differences.append(f"{name} {recorded}, and here it is {current}")
        if differences:
            raise DataError(
                f"{self._recorded} can't be repeated bit by bit: it was recorded with "
                f"{'; '.join(differences)}. Repeat it where that is the same: the version of torch, "
                "OMP_NUM_THREADS, TURNWISE_KERNELS, device and processor decide it"
            )
        self._write({"on": dict(conditions)})

    def stepped(self, admissions: Admissions) -> None:
        """Records a step of the engine and the requests it admitted."""
        if admissions:
            self._flush()
        num_steps = self._pending.num_steps + 1
        self._pending = EngineSteps(admissions or self._pending.admissions, num_steps)
        if isinstance(self._next, EngineSteps):
            num_left = self._next.num_steps - 1
            if num_left:
                self._next = EngineSteps((), num_left)
            else:
                self._next = next(self._events, None)

    def updated(self, version: int) -> None:
        """Records that the weights now have this version."""
        self._flush()
        self._write({"update": version})
        if self._next == version:
            self._next = next(self._events, None)

    def record_batch(self, step: int, groups: BatchGroups) -> None:
        """Records the groups of a step's batch, and those that failed or were filtered out since the batch
        before."""
        self._num_batches += 1
        event: dict[str, Any] = {"batch": step}
        if len(groups.parts) > 1:
            event["parts"] = groups.parts
        else:
            event["groups"] = groups.parts[0]
        if groups.rejected:
            event["rejected"] = groups.rejected
        self._write(event)

    def admitted(self, index: int, version: int) -> None:
        """Records with which version of the tasks' state a group was admitted. Version 0 isn't written."""
        if version:
            self._write({"task": index, "version": version})

    def validated(self) -> None:
        """Records that a validation was played to its end."""
        self._write({"validation": self._num_batches})

    def resumed(self) -> None:
        """Records that this run continued from a checkpoint, so the file can't be followed."""
        self._write({"resumed": True})

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        if self._pending.num_steps:
            self._write({"admit": self._pending.admissions, "steps": self._pending.num_steps})
        self._pending = EngineSteps((), 0)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            line = json.dumps(event, separators=(",", ":"))
            self._file.write(line + "\n")
            self._file.flush()


def _decode(event: dict[str, Any]) -> EngineSteps | int:
    if "update" in event:
        return int(event["update"])
    admissions = tuple((request_id, slot) for request_id, slot in event["admit"])
    return EngineSteps(admissions, event["steps"])


def _decode_batch(event: dict[str, Any]) -> BatchGroups:
    parts = event.get("parts") or [event["groups"]]
    return BatchGroups(parts, event.get("rejected", []))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        events = [event for _, event in read_jsonl(path)]
    except DataError as fault:
        raise DataError(
            f"{path} holds no schedule to replay ({fault}); asynchronous runs (async_generation_ratio > 0) "
            "write one"
        ) from fault
    if any("resumed" in event for event in events):
        raise DataError(
            f"{path} belongs to a resumed run; only a run that was played from its start can be replayed"
        )
    return events
