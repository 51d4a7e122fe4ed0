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
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.source import Part, ScoreGroup, played_of
from turnwise.rollout.tasks import TaskSource
from turnwise.runtime.schedule_log import BatchGroups, ScheduleLog
from turnwise.runtime.stopwatch import Stopwatch, Work
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
        self._player = GroupPlayer(
            agents, contexts, sampling, settings, watchdog or Watchdog(), self._count_episode
        )
        self._work = Work("episodes", 0)  # episodes of the current batch
        self._num_ended: dict[int, int] = {}  # index of each playing group → number of its ended episodes
        self._is_fixed = is_fixed
        self._keep = keep
        self.score = score
        self._versions: dict[int, int] = {}
        """Index of each admitted group → version of the tasks' state from which its task is made."""
        self._all_splits_log = schedule_log or ScheduleLog()
        self._schedule_log = (
            ScheduleLog() if is_fixed else self._all_splits_log
        )  # a fixed batch needs no record of its groups
        self._stopwatch = stopwatch or Stopwatch()
        self._failures = Failures()
        self._buffer = GroupBuffer(self.settings, self._tasks.num_tasks)
        self._played: dict[int, Group] = {}  # groups that have ended and aren't handed out yet
        self._failing: dict[
            int, Group
        ] = {}  # failed episodes of playing groups, for `rejected` if the batch ends early
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
        return self.settings.describe(self._keep.name if self._keep else "")

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
        before = self._buffer.state_dict()
        self.finished, self.rejected = [], []
        part, parts = Part([], is_last=False), list[list[int]]()
        with ExitStack() as on_error:
            on_error.callback(self._go_back, before)
            on_error.callback(self._halt)
            self._buffer.begin(num_trajectories // self.settings.group_size)
            num_groups = self._buffer.num_missing  # fewer at the end of the tasks
            self._work = Work("episodes", num_groups * self._episodes_of_group, count=self._num_done)
            self._allow_failures(num_groups * self.group_size)
            while not part.is_last:
                part = self._run_async(self._collect(parts, is_streamed))
                if not part.is_last:
                    yield part
            on_error.pop_all()
        self.num_episodes += len(self.finished) * self.settings.group_size
        yield part

    def _allow_failures(self, num_episodes: int) -> None:
        """Sets how many episodes of the batch may fail. A validation needs at least one that doesn't, to
        measure anything."""
        allowed = round(
            self.settings.max_failed_fraction * num_episodes, 6
        )  # 0.29 × 100 is a little less than 29 in binary
        self._failures.num_episodes = num_episodes
        self._failures.allowed = min(allowed, num_episodes - 1) if self._is_fixed else allowed

    def num_trajectories(self, asked: int) -> int:
        """The size of a batch for which `asked` trajectories are requested: `asked`, or less if there are too
        few tasks."""
        most = self._tasks.num_tasks
        return asked if most is None else min(asked, most * self.group_size)

    def _go_back(self, before: Mapping[str, Any]) -> None:
        """Restores the state from before a batch that ended early, so that the batch is played again, even
        after Ctrl-C."""
        self._buffer = GroupBuffer(self.settings, self._tasks.num_tasks)
        self._buffer.load_state_dict(before)
        self._fault = None
        self._failures.clear()
        self._hand_out()
        self.rejected += self._failing.values()
        self._failing.clear()

    async def _collect(self, parts: list[list[int]], is_streamed: bool) -> Part:
        """Returns the batch's next part and adds the part's group indices to `parts`. After the last part,
        removes the batch from the buffer. Unless streamed, orders the batch by index, so that it doesn't
        matter which group ends first."""
        self._stopwatch.work = self._work
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(self._stop)
            is_last = await self._selected(parts, is_streamed)
            indices = self._buffer.selected[sum(map(len, parts)) :]
            parts.append(indices if is_streamed else sorted(indices))
            part = Part([self._played[index] for index in parts[-1]], is_last)
            if is_last:
                await self._close_batch(parts)
                self._work.done, self._work.count = self._work.total, None
            on_error.pop_all()
        return part

    async def _selected(self, parts: Sequence[Sequence[int]], is_streamed: bool) -> bool:
        """Waits until the batch has another part; returns whether it is the last part. Raises the error that
        ended a group."""
        recorded = self._schedule_log.batch(self._buffer.step)
        num_known = sum(map(len, parts))
        self._admit()
        while self._fault is None:
            if recorded is not None:
                is_last = len(parts) + 1 == len(recorded.parts)
                have_left = not is_last or all(map(self._buffer.is_gone, recorded.rejected))
                if have_left and self._buffer.select_recorded(recorded.parts[len(parts)]):
                    return is_last
            elif (is_last := self._buffer.select()) or (
                is_streamed and len(self._buffer.selected) > num_known
            ):
                return is_last
            self._has_changed.clear()
            await self._has_changed.wait()
        raise self._fault

    async def _close_batch(self, parts: list[list[int]]) -> None:
        stale = self._buffer.close_step()
        await cancel(self._running.pop(index) for index in stale if index in self._running)
        for index in stale:
            self._failing.pop(index, None)
            group = self._played.setdefault(index, Group(self._task(index), [], index))
            group.rejected = "stale"
        self._failures.clear()
        self._hand_out(self._schedule_log.batch(self._buffer.step))
        self._tasks.observe(
            self.finished + [group for group in self.rejected if group.rejected == "filtered"]
        )
        if self._is_fixed:
            self._all_splits_log.validated()
        rejected = [group.index for group in self.rejected if group.rejected != "stale"]
        self._schedule_log.record_batch(self._buffer.step, BatchGroups(parts, rejected))
        self._say_what_is_missing()
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
            if (index := self._buffer.admit()) is None:
                return
            if index not in self._versions:
                self._versions[index] = self._version_at(index)
                self._schedule_log.admitted(index, self._versions[index])
            task = self._running[index] = asyncio.get_running_loop().create_task(
                self._group(index), name=f"group {index}"
            )
            task.add_done_callback(partial(self._end, index))

    def _end(self, index: int, task: asyncio.Task[Group]) -> None:
        """Handles the end of a group's asyncio task. Tasks that the scheduler cancels aren't in `_running`
        any more."""
        if self._running.pop(index, None) is None:
            return
        if task.cancelled():
            self._fault = RolloutError(f"group {index} was cancelled by something other than the scheduler")
        elif (fault := task.exception()) is not None:
            self._fault = self._fault or fault
        else:
            self._buffer.finish(index, task.result().rejected)
            self._admit()
        self._has_changed.set()

    async def _group(self, index: int) -> Group:
        self._stopwatch.num_playing += 1
        self._num_ended[index] = 0
        try:
            group = await self._player.play(self._task(index), index, partial(self._fail, index))
            if self.score is not None and (failed := await self.score(group)):
                self._fail(index, failed)
        finally:
            self._stopwatch.num_playing -= 1
            del self._num_ended[index]
        self._played[index] = group
        self._failing.pop(index, None)
        if not self._is_fixed and any(trajectory.error is not None for trajectory in played_of(group)):
            group.rejected = "failed"
        elif self._keep and not self._keep(group):
            group.rejected = "filtered"
        self._schedule_log.check(index, group.rejected is not None)
        return group

    def _fail(self, index: int, failed: list[Trajectory]) -> None:
        """Notes episodes that failed for good; raises RolloutError if too many have. A replay doesn't count
        failures in groups that the recorded run rejected too: a batch of the replay may have more such groups
        than the recorded batch."""
        group = self._failing.setdefault(index, Group(self._task(index), [], index, rejected="failed"))
        group.trajectories += failed
        if not self._schedule_log.rejects(index):
            self._failures.add(failed)

    def _count_episode(self, index: int) -> None:
        self._num_ended[index] += 1

    def _num_done(self) -> int:
        """Number of ended episodes in the selected groups, and in as many playing groups as the batch lacks.
        Groups of later batches play too, so a count of all episodes wouldn't tell when the batch is
        complete."""
        size, num_missing = self._episodes_of_group, self._buffer.num_missing
        others = [min(num, size) for num in self._num_ended.values()]
        if not self.settings.is_ordered:
            others.sort(reverse=True)
        num_ended = len(self._buffer.selected) * size + sum(others[:num_missing])
        return min(num_ended, self._work.total - (num_missing > 0))

    @property
    def _episodes_of_group(self) -> int:
        return self.group_size + self.settings.has_greedy_sibling

    def _hand_out(self, recorded: BatchGroups | None = None) -> None:
        """Moves the groups that have left the buffer into `finished` and `rejected`. In a replay, `recorded`
        is the same batch of the recorded run: a rejected group that isn't in `recorded.rejected` waits for a
        later batch."""
        gone = [index for index in sorted(self._played) if index not in self._buffer]
        if recorded is not None:
            gone = [
                index for index in gone if self._played[index].rejected is None or index in recorded.rejected
            ]
        left = [self._played.pop(index) for index in gone]
        self.finished = [group for group in left if group.rejected is None]
        self.rejected = [group for group in left if group.rejected]
        self._versions = {
            index: version for index, version in self._versions.items() if index in self._buffer
        }

    def _say_what_is_missing(self) -> None:
        num_kept, num_groups = len(self.finished), self._buffer.num_groups
        num_filtered = sum(group.rejected == "filtered" for group in self.rejected)
        if self._keep and num_filtered and num_kept < num_groups:
            limit = f"max_refill_factor {self.settings.max_refill_factor:g} allows no more of them"
            logger.warning(
                "group_filter %s kept %d of %d groups, and %s: %s",
                self._keep.name,
                num_kept,
                num_kept + num_filtered,
                "no task is left" if self._buffer.is_exhausted else limit,
                f"training on {num_kept} groups instead of {num_groups}"
                if num_kept
                else "this step trains on nothing",
            )

    async def _stop(self) -> None:
        running, self._running = self._running, {}
        await cancel(running.values())

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
        return {
            **self._buffer.state_dict(),
            "num_episodes": self.num_episodes,
            "groups": [write_group(self._buffer.step, group) for group in self._played.values()],
            "tasks": self._tasks.state_dict(),
            "task_versions": list(self._versions.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "next_index" not in state:
            raise CheckpointError(
                "this checkpoint was saved by a run that trained from a file; continue with the same "
                "--from-rollouts, or start "
                "a new run from its weights with pretrain"
            )
        if "groups" not in state:
            raise CheckpointError(
                "this checkpoint was saved by an earlier version, without what was played ahead; start a "
                "new run from its "
                "weights with pretrain"
            )
        self._buffer.load_state_dict(state)
        self._tasks.load_state_dict(state.get("tasks", {}))
        self._versions = dict(state.get("task_versions", []))
        self.num_episodes = state["num_episodes"]
        temperature = self._player.sampling.temperature
        self._played = {
            group.index: group for group in (read_group(lines, temperature) for lines in state["groups"])
        }
        for group in self._played.values():
            if self._buffer.has_finished(group.index) and not self._fits(group):
                self._buffer.restart(group.index)

    def _fits(self, group: Group) -> bool:
        """Whether a restored group has this run's group size and, if the run needs one, a greedy sibling."""
        num_siblings = len({trajectory.sibling for trajectory in group.trajectories})
        return num_siblings == self.settings.group_size and (
            group.greedy is not None or not self.settings.has_greedy_sibling
        )
