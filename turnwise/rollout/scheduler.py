"""Plays groups of sibling episodes concurrently, as far ahead of training as allowed, and hands out complete
groups."""

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

from turnwise.errors import CheckpointError, ConfigError, RolloutError
from turnwise.protocols import AgentLoop
from turnwise.rollout.buffer import GroupBuffer
from turnwise.rollout.failures import Failures
from turnwise.rollout.group_filter import GroupFilter
from turnwise.rollout.journal import read_group, write_group
from turnwise.rollout.player import EpisodeContexts, GroupPlayer, cancel
from turnwise.rollout.progress import BatchProgress
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.source import Part, ScoreGroup, played_of
from turnwise.rollout.tasks import TaskSource
from turnwise.runtime.schedule_log import BatchGroups, ScheduleLog
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Group, SamplingParams, Task, Trajectory

logger = logging.getLogger(__name__)


class RolloutScheduler:
    """Plays the tasks of one split, and is the `RolloutSource` of its batches.

    A group's index is the number of groups admitted before it. A synchronous run hands groups out in the
    order of their indices, so that training does not depend on which episode was quickest. If
    `async_generation_ratio` is above 0, groups keep playing between two batches, whenever the event loop
    runs; `GroupBuffer` decides which of them go into a batch.

    With `is_fixed` (validation) every batch begins again at the first task, and a failed episode stays in its
    group. Otherwise a group that has a failed episode or that `keep` drops is in `rejected` until the next
    batch; another task replaces it.

    `agents` returns the agent that plays a task. `contexts` takes an episode's id and returns its
    `EpisodeContexts`. `score` rewards a complete group before the filter sees it. `run_async` runs a
    coroutine on the run's event loop and returns its result. `watchdog` ends episodes that run past their
    deadline. `schedule_log` records or prescribes which groups go into each training batch. `stopwatch` is
    told how many groups are playing."""

    def __init__(
        self,
        *,
        run_async: Callable[..., Any],
        tasks: TaskSource,
        agents: Callable[[Task], AgentLoop],
        contexts: Callable[[str], EpisodeContexts],
        sampling: SamplingParams,
        settings: SchedulerSettings,
        is_fixed: bool = False,
        keep: GroupFilter | None = None,
        score: ScoreGroup | None = None,
        watchdog: Watchdog | None = None,
        schedule_log: ScheduleLog | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.settings = settings
        self._run_async = run_async
        self._tasks = tasks
        self._progress = BatchProgress(settings)
        self._player = GroupPlayer(
            agents,
            contexts,
            sampling,
            settings,
            watchdog or Watchdog(),
            self._progress.end_episode,
        )
        self._is_fixed = is_fixed
        self._keep = keep
        self.score = score
        self._versions: dict[int, int] = {}
        """Index of each admitted group → version of the tasks' state from which its task is made."""
        self._all_splits_log = schedule_log or ScheduleLog()
        # A fixed batch needs no record of its groups.
        self._schedule_log = ScheduleLog() if is_fixed else self._all_splits_log
        self._stopwatch = stopwatch or Stopwatch()
        self._failures = Failures()
        self._buffer = GroupBuffer(self.settings, self._tasks.num_tasks)
        self._played: dict[int, Group] = {}  # groups that have ended and aren't handed out yet
        # Failed episodes of playing groups, for `rejected` if the batch ends early.
        self._failing: dict[int, Group] = {}
        self._running: dict[int, asyncio.Task[Group]] = {}
        self._has_changed = asyncio.Event()
        self._fault: BaseException | None = None  # the error that ended a group, until a batch raises it
        self._open_parts: Generator[Part] | None = None
        self.num_episodes = 0
        self.finished: list[Group] = []
        """Finished groups of the last batch, even if it ended early."""
        self.rejected: list[Group] = []

    @property
    def group_size(self) -> int:
        return self.settings.group_size

    @property
    def is_exhausted(self) -> bool:
        """Whether all tasks have been played and all groups handed out; always False with `is_fixed`."""
        return not self._is_fixed and self._buffer.is_exhausted

    def describe(self) -> str:
        return self.settings.describe("" if self._keep is None else self._keep.name)

    def get_batch(self, num_trajectories: int) -> list[Group]:
        """Plays and returns `num_trajectories` trajectories in complete groups, ordered by group index;
        fewer, perhaps none, if the filter rejects more groups than may be replaced or the tasks run out. An
        error or Ctrl-C ends all episodes and restores the position in the tasks, so that the next batch plays
        the same tasks."""
        [part] = self.parts(num_trajectories, is_streamed=False)
        return part.groups

    def parts(self, num_trajectories: int, is_streamed: bool) -> Generator[Part]:
        """See `RolloutSource.parts`. Other groups play on between two parts. If an error ends the batch, or
        the generator is closed before the last part, the next batch plays the same tasks again. `close`
        closes the generator too."""
        self._open_parts = self._parts(num_trajectories, is_streamed)
        return self._open_parts

    def _parts(self, num_trajectories: int, is_streamed: bool) -> Generator[Part]:
        if num_trajectories % self.settings.group_size:
            raise ConfigError(
                f"asked for {num_trajectories} trajectories in groups of {self.settings.group_size}; "
                "make rollout_batch_size (val_batch_size) a multiple of the environment manager's group_size"
            )
        if self._is_fixed:
            self._all_splits_log.begin_validation()
            self._buffer = GroupBuffer(self.settings, self._tasks.num_tasks)
        start_state = self._buffer.state_dict()
        self.finished = []
        self.rejected = []
        part = Part([], is_last=False)
        parts: list[list[int]] = []
        with ExitStack() as on_error:
            on_error.callback(self._go_back, start_state)
            on_error.callback(self._halt)
            self._buffer.begin(num_trajectories // self.settings.group_size)
            self._progress.begin(self._buffer)
            self._failures.begin(
                self._buffer.num_missing * self.group_size,
                self.settings.max_failed_fraction,
                needs_success=self._is_fixed,  # without any, a validation measures nothing
            )
            while not part.is_last:
                part = self._run_async(self._collect(parts, is_streamed))
                if not part.is_last:
                    yield part
            on_error.pop_all()
        self.num_episodes += len(self.finished) * self.settings.group_size
        yield part

    def num_trajectories(self, requested: int) -> int:
        """The size of a batch for which `requested` trajectories are requested: `requested`, or less if there
        are too few tasks."""
        num_tasks = self._tasks.num_tasks
        if num_tasks is None:
            return requested
        return min(requested, num_tasks * self.group_size)

    def _go_back(self, start_state: Mapping[str, Any]) -> None:
        """Restores the state from before a batch that ended early, so that the batch is played again, even
        after Ctrl-C."""
        self._buffer = GroupBuffer(self.settings, self._tasks.num_tasks)
        self._buffer.load_state_dict(start_state)
        self._fault = None
        self._failures.clear()
        self._hand_out()
        self.rejected += self._failing.values()
        self._failing.clear()

    async def _collect(self, parts: list[list[int]], is_streamed: bool) -> Part:
        """Returns the batch's next part and adds the part's group indices to `parts`. After the last part,
        removes the batch from the buffer. Unless streamed, orders the batch by index, so that it doesn't
        matter which group ends first."""
        self._stopwatch.work = self._progress.work
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(self._stop)
            is_last = await self._selected(parts, is_streamed)
            indices = self._buffer.selected[_num_groups(parts) :]
            if not is_streamed:
                indices = sorted(indices)
            parts.append(indices)
            part = Part([self._played[index] for index in indices], is_last)
            if is_last:
                await self._close_batch(parts)
                self._progress.end()
            on_error.pop_all()
        return part

    async def _selected(self, parts: Sequence[Sequence[int]], is_streamed: bool) -> bool:
        """Waits until the batch has another part; returns whether it is the last part. Raises the error that
        ended a group."""
        recorded = self._schedule_log.batch(self._buffer.step)
        num_earlier = _num_groups(parts)
        self._admit()
        while self._fault is None:
            if recorded is not None:
                is_last = len(parts) + 1 == len(recorded.parts)
                # The last part also waits until the groups that the recorded batch rejected are rejected.
                is_due = not is_last or all(map(self._buffer.is_gone, recorded.rejected))
                is_ready = is_due and self._buffer.select_recorded(recorded.parts[len(parts)])
            else:
                is_last = self._buffer.select()
                has_new = is_streamed and len(self._buffer.selected) > num_earlier
                is_ready = is_last or has_new
            if is_ready:
                return is_last
            self._has_changed.clear()
            await self._has_changed.wait()
        raise self._fault

    async def _close_batch(self, parts: list[list[int]]) -> None:
        stale = self._buffer.close_step()
        still_running = [index for index in stale if index in self._running]
        await cancel(map(self._running.pop, still_running))
        for index in stale:
            self._failing.pop(index, None)
            unplayed = Group(self._task(index), [], index)
            group = self._played.setdefault(index, unplayed)
            group.rejected = "stale"
        self._failures.clear()
        self._hand_out(self._schedule_log.batch(self._buffer.step))
        filtered = [group for group in self.rejected if group.rejected == "filtered"]
        self._tasks.observe(self.finished + filtered)
        if self._is_fixed:
            self._all_splits_log.validated()
        rejected = [group.index for group in self.rejected if group.rejected != "stale"]
        self._schedule_log.record_batch(self._buffer.step, BatchGroups(parts, rejected))
        self._warn_of_missing_groups()
        self._admit()

    def _task(self, index: int) -> Task:
        return self._tasks.task(index, self._versions.get(index))

    def _version_at(self, index: int) -> int:
        """The version of the tasks' state for a group at its admission: the newest, or the recorded one in a
        replay."""
        recorded = self._schedule_log.task_version(index)
        return self._tasks.version if recorded is None else recorded

    def _admit(self) -> None:
        while self._fault is None and self._version_at(self._buffer.next_index) <= self._tasks.version:
            index = self._buffer.admit()
            if index is None:
                return
            if index not in self._versions:
                self._versions[index] = self._version_at(index)
                self._schedule_log.admitted(index, self._versions[index])
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._group(index), name=f"group {index}")
            self._running[index] = task
            task.add_done_callback(partial(self._end, index))

    def _end(self, index: int, task: asyncio.Task[Group]) -> None:
        """Handles the end of a group's asyncio task. Tasks that the scheduler cancels aren't in `_running`
        any more."""
        if self._running.pop(index, None) is None:
            return
        if task.cancelled():
            self._fault = RolloutError(f"group {index} was cancelled by something other than the scheduler")
        elif task.exception() is not None:
            self._fault = self._fault or task.exception()
        else:
            self._buffer.finish(index, task.result().rejected)
            self._admit()
        self._has_changed.set()

    async def _group(self, index: int) -> Group:
        self._stopwatch.num_playing += 1
        self._progress.begin_group(index)
        try:
            group = await self._player.play(self._task(index), index, partial(self._fail, index))
            failed = [] if self.score is None else await self.score(group)
            if failed:
                self._fail(index, failed)
        finally:
            self._stopwatch.num_playing -= 1
            self._progress.end_group(index)
        self._played[index] = group
        self._failing.pop(index, None)
        errors = [trajectory.error for trajectory in played_of(group) if trajectory.error is not None]
        if errors and not self._is_fixed:
            group.rejected = "failed"
        elif self._keep and not self._keep(group):
            group.rejected = "filtered"
        self._schedule_log.check(index, group.rejected is not None)
        return group

    def _fail(self, index: int, failed: list[Trajectory]) -> None:
        """Notes episodes that failed for good; raises RolloutError if too many have. A replay doesn't count
        failures in groups that the recorded run rejected too: a batch of the replay may have more such groups
        than the recorded batch."""
        unplayed = Group(self._task(index), [], index, rejected="failed")
        group = self._failing.setdefault(index, unplayed)
        group.trajectories += failed
        if not self._schedule_log.rejects(index):
            self._failures.add(failed)

    def _hand_out(self, recorded: BatchGroups | None = None) -> None:
        """Moves the groups that have left the buffer into `finished` and `rejected`. In a replay, `recorded`
        is the same batch of the recorded run: a rejected group that isn't in `recorded.rejected` waits for a
        later batch."""
        groups = []
        for index in sorted(self._played):
            is_rejected = self._played[index].rejected is not None
            is_early = is_rejected and recorded is not None and index not in recorded.rejected
            if index not in self._buffer and not is_early:
                groups.append(self._played.pop(index))
        self.finished = [group for group in groups if group.rejected is None]
        self.rejected = [group for group in groups if group.rejected]
        self._versions = {
            index: version for index, version in self._versions.items() if index in self._buffer
        }

    def _warn_of_missing_groups(self) -> None:
        num_kept = len(self.finished)
        num_groups = self._buffer.num_groups
        num_filtered = sum(group.rejected == "filtered" for group in self.rejected)
        if not self._keep or not num_filtered or num_kept >= num_groups:
            return
        limit = f"max_refill_factor {self.settings.max_refill_factor:g} allows no more of them"
        effect = f"training on {num_kept} groups instead of {num_groups}"
        logger.warning(
            "group_filter %s kept %d of %d groups, and %s: %s",
            self._keep.name,
            num_kept,
            num_kept + num_filtered,
            "no task is left" if self._buffer.is_exhausted else limit,
            effect if num_kept else "this step trains on nothing",
        )

    async def _stop(self) -> None:
        running = list(self._running.values())
        self._running.clear()  # first, so that `_end` ignores the cancelled tasks
        await cancel(running)

    def _halt(self) -> None:
        if self._running:
            self._run_async(self._stop())

    def close(self) -> None:
        """Ends the playing groups and closes the replay log."""
        if self._open_parts is not None:
            self._open_parts.close()
        self._halt()
        self._schedule_log.close()

    def state_dict(self) -> dict[str, Any]:
        """The position in the sequence of tasks, the number of episodes handed out, and the finished groups
        that aren't handed out yet. A run that continues from here starts unfinished groups again, with the
        same seeds."""
        step = self._buffer.step
        groups = [write_group(step, group) for group in self._played.values()]
        return {
            **self._buffer.state_dict(),
            "num_episodes": self.num_episodes,
            "groups": groups,
            "tasks": self._tasks.state_dict(),
            "task_versions": list(self._versions.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "next_index" not in state:
            raise CheckpointError(
                "this checkpoint was saved by a run that trained from a file; continue with the same "
                "--from-rollouts, or start a new run from its weights with pretrain"
            )
        if "groups" not in state:
            raise CheckpointError(
                "this checkpoint was saved by an earlier version, without what was played ahead; start a "
                "new run from its weights with pretrain"
            )
        self._buffer.load_state_dict(state)
        self._tasks.load_state_dict(state.get("tasks", {}))
        self._versions = dict(state.get("task_versions", []))
        self.num_episodes = state["num_episodes"]
        temperature = self._player.sampling.temperature
        groups = [read_group(lines, temperature) for lines in state["groups"]]
        self._played = {group.index: group for group in groups}
        for group in groups:
            if self._buffer.has_finished(group.index) and not self._fits(group):
                self._buffer.restart(group.index)

    def _fits(self, group: Group) -> bool:
        """Whether a restored group has this run's group size and, if the run needs one, a greedy sibling."""
        siblings = {trajectory.sibling for trajectory in group.trajectories}
        has_baseline = group.greedy is not None or not self.settings.has_greedy_sibling
        return len(siblings) == self.settings.group_size and has_baseline


def _num_groups(parts: Sequence[Sequence[int]]) -> int:
    return sum(len(part) for part in parts)
