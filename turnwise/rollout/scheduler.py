"""Plays groups of sibling episodes concurrently and hands them out in complete groups."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.batching.samples import build_samples
from turnwise.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    ReplicasDeadError,
    RolloutError,
    TurnwiseError,
)
from turnwise.protocols import AgentLoop, OpenConversation
from turnwise.rollout.group_filter import GroupFilter
from turnwise.rollout.seeds import TaskSource, sibling_sampling
from turnwise.rollout.source import Rejection, played_of
from turnwise.types import Group, SamplingParams, Task, Trajectory
from turnwise.watchdog import Wait, Watchdog

logger = logging.getLogger(__name__)


class EpisodeContexts(OpenConversation, Protocol):
    """Opens the contexts of one episode and, when it is over, releases what the servers keep for them."""

    def verify(self) -> None:
        """Raises RolloutError where the turns of a context aren't the tokens that the server saw."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How many episodes run at once, and what becomes of failures and of groups that the filter doesn't keep.

    `max_failed_fraction` is of the trajectories asked for in one batch: beyond it the run stops with the most frequent
    error, since refilling would only hide it. At most `max_refill_factor` times the groups of a batch are played to replace
    filtered ones.
    """

    group_size: int
    max_concurrent_groups: int
    max_env_retries: int = 2
    max_failed_fraction: float = 0.2
    episode_timeout_s: float | None = None
    max_refill_factor: float = 3.0
    has_greedy_sibling: bool = False
    """Whether each group has one more episode, played greedily, as its siblings' baseline."""

    @property
    def num_concurrent_episodes(self) -> int:
        """The greedy ones among them."""
        return self.max_concurrent_groups * (self.group_size + self.has_greedy_sibling)


class RolloutScheduler:
    """The source of rollouts of one split.

    Groups are numbered in the order of their admission and handed out in that order, so that what is trained on does not
    depend on which episode was quickest. With `is_fixed` (validation) every batch plays the same first tasks, and a failed
    episode stays in its group as a failure; otherwise another task takes the place of a group with a failed episode, or of
    one that `keep` says no to, and the group is in `rejected` until the next batch, for the record.

    `run_async` waits for a coroutine on the run's event loop. `watchdog` ends episodes that run past their deadline.
    """

    def __init__(
        self,
        *,
        run_async: Callable[..., list[Group]],
        tasks: TaskSource,
        agents: Mapping[str, AgentLoop],
        contexts: Callable[[str], EpisodeContexts],
        sampling: SamplingParams,
        settings: SchedulerSettings,
        is_fixed: bool = False,
        keep: GroupFilter | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.settings = settings
        self._run_async = run_async
        self._tasks = tasks
        self._agents = agents
        self._contexts = contexts
        self._sampling = sampling
        self._is_fixed = is_fixed
        self._keep = keep
        self._watchdog = watchdog or Watchdog()
        self._next_index = 0
        self.num_episodes = 0
        self.finished: list[Group] = []
        """Groups of the last batch that were played to their end, also where something ended it early."""
        self.rejected: list[Group] = []

    @property
    def group_size(self) -> int:
        return self.settings.group_size

    def describe(self) -> str:
        """How it plays, in a few words."""
        settings = self.settings
        parts = [f"{settings.num_concurrent_episodes} episodes at once"]
        parts += ["one of each group greedy"] if settings.has_greedy_sibling else []
        if self._keep:
            parts.append(f"groups filtered by {self._keep.name}, at most {settings.max_refill_factor:g} × the batch refilled")
        return ", ".join(parts)

    def get_batch(self, num_trajectories: int) -> list[Group]:
        """Plays and returns `num_trajectories` trajectories in complete groups, ordered by group index; fewer, and perhaps
        none, where the filter has rejected more than may be refilled.

        Whatever ends it early, the position in the tasks is then what it was: the next batch plays the same ones.

        Raises:
            RolloutError: more than `max_failed_fraction` of them failed for good, or the filter is broken.
            EnvironmentFault: the siblings of a group did not start in the same state.
        """
        if num_trajectories % self.settings.group_size:
            raise ConfigError(
                f"asked for {num_trajectories} trajectories in groups of {self.settings.group_size}; "
                "make rollout_batch_size (val_batch_size) a multiple of the environment manager's group_size"
            )
        if self._is_fixed:
            self._next_index = 0
        start = self._next_index
        self.finished, self.rejected = [], []
        try:
            groups = self._run_async(self._collect(num_trajectories // self.settings.group_size))
        except BaseException:  # Ctrl-C too: a step that is dropped is played again
            self._next_index = start
            raise
        self.num_episodes += len(groups) * self.settings.group_size
        return groups

    async def _collect(self, num_groups: int) -> list[Group]:
        """The next groups that are kept. Which ones these are doesn't depend on the order in which groups end."""
        failures = _Failures(allowed=self.settings.max_failed_fraction * num_groups * self.settings.group_size)
        # Rounded first, since 0.29 × 100 is a little less than 29 in binary.
        num_refills = int(round(self.settings.max_refill_factor * num_groups, 6))
        played: dict[int, Group] = {}
        running: dict[asyncio.Task[Group], int] = {}
        num_wanted, num_kept, num_filtered = num_groups, 0, 0
        try:
            while num_kept < num_wanted:
                while len(running) < self.settings.max_concurrent_groups and num_kept + len(running) < num_wanted:
                    running[asyncio.create_task(self._group(self._next_index))] = self._next_index
                    self._next_index += 1
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for finished in sorted(done, key=running.__getitem__):
                    index = running.pop(finished)
                    group = played[index] = finished.result()
                    group.rejected = self._rejection(group)
                    failures.add(group)
                    num_kept += group.rejected is None
                    num_filtered += group.rejected == "filtered"
                num_wanted = num_groups - max(0, num_filtered - num_refills)
        finally:
            await _cancel(running)
            in_order = [played[index] for index in sorted(played)]
            self.finished = [group for group in in_order if group.rejected is None]
            self.rejected = [group for group in in_order if group.rejected]
        if self._keep and num_kept < num_groups:
            logger.warning(
                "group_filter %s kept %d of %d groups, and max_refill_factor %g allows no more of them: %s",
                self._keep.name,
                num_kept,
                num_kept + num_filtered,
                self.settings.max_refill_factor,
                f"training on {num_kept} groups instead of {num_groups}" if num_kept else "this step trains on nothing",
            )
        return self.finished

    def _rejection(self, group: Group) -> Rejection | None:
        """Why a group that was played is replaced."""
        if not self._is_fixed and any(trajectory.error is not None for trajectory in played_of(group)):
            return "failed"
        return "filtered" if self._keep and not self._keep(group) else None

    async def _group(self, index: int) -> Group:
        task = self._tasks.task(index)
        size, samplings = self.settings.group_size, [self._sampling] * self.settings.group_size
        if self.settings.has_greedy_sibling:
            samplings.append(replace(self._sampling, do_sample=False))
        episodes = [
            asyncio.create_task(self._episode(task, sibling, sampling), name=f"episode {task.id}/{sibling}")
            for sibling, sampling in enumerate(samplings)
        ]
        try:
            played = await asyncio.gather(*episodes)
        finally:
            # Only an error that ends the run comes here with episodes still going: failures are data.
            await _cancel(episodes)
        # The trajectories of one run share its score, so that any of them is the baseline.
        greedy = next(iter(played[size]), None) if self.settings.has_greedy_sibling else None
        group = Group(task, [t for trajectories in played[:size] for t in trajectories], index, greedy)
        _check_same_start(group)
        return group

    async def _episode(self, task: Task, sibling: int, sampling: SamplingParams) -> list[Trajectory]:
        """One episode with its retries. The boundary at which an exception of agent or environment becomes data."""
        error = ""
        for attempt in range(1 + self.settings.max_env_retries):
            contexts = self._contexts(f"{task.id}/{sibling}/{attempt}")
            try:
                async with self._limit(task.tag):
                    own_sampling = sibling_sampling(sampling, task, sibling)
                    trajectories = await self._agents[task.tag].run(task, sibling, contexts, own_sampling)
                contexts.verify()
                for trajectory in trajectories:
                    trajectory.samples = build_samples(trajectory)
                return trajectories
            except (ConfigError, DeadlineError, ReplicasDeadError):
                raise
            except RolloutError as fault:
                # Not a matter of chance: the same prompt would be as long in a second attempt.
                error = str(fault)
                break
            except Exception as fault:
                is_told = isinstance(fault, TurnwiseError)
                error = str(fault) if is_told else "".join(traceback.format_exception(fault)).rstrip()
            finally:
                await contexts.close()
            logger.warning("episode %s, sibling %d, attempt %d failed: %s", task.id, sibling, attempt + 1, _headline(error))
        return [Trajectory(task=task, sibling=sibling, status="failed", error=error)]

    def _limit(self, tag: str) -> Wait:
        awaited, timeout_s = f"an episode of {tag} to end", self.settings.episode_timeout_s
        return self._watchdog.waiting("the rollouts", awaited, timeout_s, "episode_timeout_s", EnvironmentFault)

    def state_dict(self) -> dict[str, int]:
        """The position in the sequence of tasks, and how many episodes were handed out."""
        return {"next_index": self._next_index, "num_episodes": self.num_episodes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Raises:
        CheckpointError: it was saved by a run that didn't play.
        """
        if "next_index" not in state:
            raise CheckpointError(
                "this checkpoint was saved by a run that trained from a file; go on with the same --from-rollouts, or start a "
                "new run from its weights with pretrain"
            )
        self._next_index, self.num_episodes = state["next_index"], state.get("num_episodes", 0)


class _Failures:
    """Counts failed episodes of one batch and stops the run when there are too many."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, group: Group) -> None:
        """Counts the failed episodes of a group.

        Raises:
            RolloutError: there are now more than allowed.
        """
        for error in [trajectory.error for trajectory in played_of(group) if trajectory.error is not None]:
            kind = kind_of_failure(error, group.task)
            self._counts[kind] += 1
            self._examples.setdefault(kind, error)
        if self._counts.total() > self._allowed:
            kind, count = self._counts.most_common(1)[0]
            raise RolloutError(
                f"{self._counts.total()} episodes of this batch failed after their retries, more than "
                f"max_failed_fraction allows ({self._allowed:g}). The most frequent error ({count}×):\n"
                f"{self._examples[kind]}\n"
                "Mend the environment, or raise max_failed_fraction or max_env_retries of its environment manager."
            )


def _check_same_start(group: Group) -> None:
    # Sub-agents of a sibling start where they are called.
    first_of = {trajectory.sibling: trajectory for trajectory in reversed(played_of(group))}
    starts = {t.turns[0].observation for t in first_of.values() if t.turns}
    if len(starts) > 1:
        first, second, *_ = sorted(starts)
        raise EnvironmentFault(
            f"the siblings of {group.task.id} were all reset with seed {group.task.seed} but start differently:\n"
            f"{first}\n-- and --\n{second}\n"
            "reset(seed=...) must determine the whole start state; group statistics mean nothing otherwise"
        )


async def _cancel(running: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs and waits until it has ended, so that nothing is left on the event loop."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def kind_of_failure(error: str, task: Task) -> str:
    """What went wrong, whatever the task: the same for all episodes that fail alike."""
    return _headline(error).replace(task.id, "…")


def _headline(error: str) -> str:
    """What went wrong: the last line of a traceback. The stacks below a message are indented, and so are its own."""
    return next((line for line in reversed(error.splitlines()) if not line.startswith(" ")), "")
