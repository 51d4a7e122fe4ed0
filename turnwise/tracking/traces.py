"""Traces of a run's episodes. They wait for the step that their episode belongs to, and are then written by a
thread. A store that is slow, down or full never stops a run."""

import logging
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from turnwise.errors import counted
from turnwise.runtime.threads import DaemonThread
from turnwise.tracking.episode_spans import EpisodeSpans, error_text
from turnwise.tracking.spans import Span, Trace
from turnwise.types import Group, Task, derive_seed

logger = logging.getLogger(__name__)

CLOSE_S = 60.0
"""Seconds that a run waits at its end for traces to be written."""


class TraceStore(Protocol):
    """Where traces go. Its methods are only called in the thread of the traces."""

    place: str
    """Where people find the traces."""

    def write(self, traces: Sequence[Trace]) -> list[str]:
        """Writes traces, and returns why, for each that it had to leave out. Raises an exception if the store
        doesn't answer: none of the traces counts as written then."""

    def close(self) -> None: ...


OpenStore = Callable[[], TraceStore]
"""Opens a store, in the thread of the traces: a database may take seconds."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Which episodes are traced, and how much may wait."""

    max_tasks: int | None = None
    """Maximum tasks of a step whose episodes are traced, all siblings of each; None = all."""
    max_pending_bytes: int = 256_000_000
    """Maximum bytes of traces that wait to be written; further ones are dropped."""
    seed: int = 0
    """Chooses the tasks if a step has more than `max_tasks`."""


class Traces:
    """Traces episodes. `observe` is the observer of an episode; `end_step` says which step the episodes of
    finished groups belong to, and hands their traces to the store.

    Args:
        open_store: called once, by the thread.
        tags: tags of every trace (`run`, `experiment_name`).
    """

    def __init__(
        self,
        open_store: OpenStore,
        settings: TraceSettings,
        tags: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._tags = dict(tags)
        self._ended: dict[str, list[EpisodeSpans]] = defaultdict(list)
        """Id of a task → its episodes that have ended and belong to no step yet."""
        self._writer = _Writer(open_store, settings.max_pending_bytes)
        self._num_steps = 0

    def observe(self, task: Task, sibling: int) -> EpisodeSpans:
        """The observer of the next attempt at a task by a sibling."""
        return EpisodeSpans(task, sibling, self._end)

    def _end(self, episode: EpisodeSpans) -> None:
        self._ended[episode.task.id].append(episode)

    def add_reward(
        self, group: Group, name: str, seconds_ns: tuple[int, int], scores: Mapping[int, Any]
    ) -> None:
        """Adds a span of a reward function to the episodes of a group.

        Args:
            seconds_ns: start and end, in nanoseconds since 1970.
            scores: id of a trajectory → its score.
        """
        start_ns, end_ns = seconds_ns
        for episode in self._ended.get(group.task.id, ()):
            ids = [id(trajectory) for trajectory in episode.trajectories if id(trajectory) in scores]
            if ids:
                attributes = {"turnwise.reward_name": name, "turnwise.reward": scores[ids[0]]}
                episode.spans.append(Span(f"reward {name}", "reward", start_ns, end_ns, 0, attributes))

    def end_step(self, step: int, groups: Sequence[Group], is_validation: bool = False) -> None:
        """Writes the traces of a step's groups, rejected ones too. Steps count from 0."""
        self._num_steps = step + 1
        chosen = self._chosen(step, groups)
        traces: list[Trace] = []
        for group in groups:
            episodes = self._ended.pop(group.task.id, [])
            if group.task.id in chosen:
                tags = {"step": step, "sample_index": group.index, "validate": is_validation}
                traces += [self._trace(episode, tags) for episode in episodes]
        self._writer.put(traces)

    def _chosen(self, step: int, groups: Sequence[Group]) -> set[str]:
        """The ids of the tasks whose episodes are traced."""
        ids = {group.task.id for group in groups}
        if self._settings.max_tasks is None:
            return ids
        seed = self._settings.seed
        in_order = sorted(ids, key=lambda task_id: derive_seed(seed, "trace", step, task_id))
        return set(in_order[: self._settings.max_tasks])

    def _trace(self, episode: EpisodeSpans, tags: Mapping[str, Any]) -> Trace:
        score = None
        if episode.trajectories:
            score = episode.trajectories[0].score
        tags = {
            **self._tags,
            **tags,
            "task": episode.task.id,
            "rollout_n": episode.sibling,
            "status": episode.status,
            "score": score,
        }
        return Trace(uuid.uuid4().hex, tags, episode.spans)

    def close(self) -> None:
        """Writes the traces of the episodes that no step has used, if all tasks are traced, and waits up to
        `CLOSE_S` seconds for the store."""
        if self._settings.max_tasks is None:
            unused = []
            for episode in chain.from_iterable(self._ended.values()):
                is_validation = episode.task.split == "val"
                tags = {"step": self._num_steps, "sample_index": None, "validate": is_validation}
                unused.append(self._trace(episode, tags))
            self._writer.put(unused)
        self._ended.clear()
        self._writer.close()


class _Writer:
    """Writes batches of traces in a thread of its own, and drops those for which there is no room."""

    def __init__(self, open_store: OpenStore, max_pending_bytes: int) -> None:
        self._thread = DaemonThread("traces")
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[_Batch] = deque()
        self._num_written = 0
        self._num_dropped = 0
        self._has_warned = False
        self._open_store = open_store
        self._store: TraceStore | None = None

    def put(self, traces: Sequence[Trace]) -> None:
        """Queues traces for the store."""
        self._take_ended()
        if not traces:
            return
        num_pending = sum(batch.num_bytes for batch in self._pending)
        sizes = [trace.num_bytes for trace in traces]
        queued: list[Trace] = []
        num_bytes = 0
        for trace, size in zip(traces, sizes, strict=True):
            if num_pending + num_bytes + size <= self._max_pending_bytes:
                queued.append(trace)
                num_bytes += size
        if len(queued) < len(traces):
            self._num_dropped += len(traces) - len(queued)
            self._warn(
                f"a step has brought {_megabytes(sum(sizes))} of traces while {_megabytes(num_pending)} "
                f"waited to be written, and trace.max_pending_mb allows {_megabytes(self._max_pending_bytes)}"
            )
        if queued:
            call = self._thread.start(self._write, queued)
            self._pending.append(_Batch(call, len(queued), num_bytes))

    def _write(self, traces: Sequence[Trace]) -> list[str]:
        if self._store is None:
            self._store = self._open_store()
            logger.info("traces: %s", self._store.place)
        return self._store.write(traces)

    def _take_ended(self) -> None:
        while self._pending and self._pending[0].call.done():
            batch = self._pending.popleft()
            fault = batch.call.exception()
            if fault is not None:
                self._num_dropped += batch.num_traces
                self._warn(error_text(fault))
                continue
            reasons = batch.call.result()
            if reasons:
                self._warn(reasons[0])
            self._num_dropped += len(reasons)
            self._num_written += batch.num_traces - len(reasons)

    def _warn(self, reason: str) -> None:
        """Warns of the first trace that is lost; `close` says how many were."""
        if not self._has_warned:
            logger.warning("episodes go without a trace: %s; the run continues", reason[:500])
        self._has_warned = True

    def close(self) -> None:
        wait([batch.call for batch in self._pending], CLOSE_S)
        self._take_ended()
        is_stuck = bool(self._pending)
        for batch in self._pending:
            batch.call.cancel()
            self._num_dropped += batch.num_traces
            self._warn(f"the store did not take everything within {CLOSE_S:g} s")
        self._pending.clear()
        if self._num_dropped:
            total = self._num_written + self._num_dropped
            logger.warning("%s of %d went without a trace", counted(self._num_dropped, "episode"), total)
        closed = self._thread.start(self._close_store)
        self._thread.end()
        if not is_stuck:
            wait([closed], CLOSE_S)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:g} MB"


@dataclass(frozen=True, slots=True)
class _Batch:
    """Traces that wait to be written."""

    call: Future[list[str]]
    num_traces: int
    num_bytes: int
