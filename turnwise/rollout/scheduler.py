"""Plays groups of sibling episodes concurrently and hands them out in complete groups."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.batching.samples import build_samples
from turnwise.errors import ConfigError, DeadlineError, EnvironmentFault, ReplicasDeadError, RolloutError, TurnwiseError
from turnwise.protocols import AgentLoop, OpenConversation
from turnwise.rollout.seeds import TaskSource, sibling_sampling
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
    """How many episodes run at once, and what becomes of failures.

    `max_failed_fraction` is of the trajectories asked for in one batch: beyond it the run stops with the most frequent
    error, since refilling would only hide it.
    """

    group_size: int
    max_concurrent_groups: int
    max_env_retries: int = 2
    max_failed_fraction: float = 0.2
    episode_timeout_s: float | None = None


class RolloutScheduler:
    """The source of rollouts of one split.

    Groups are numbered in the order of their admission and handed out in that order, so that what is trained on does not
    depend on which episode was quickest. With `is_fixed` (validation) every batch plays the same first tasks, and a failed
    episode stays in its group as a failure; otherwise another task takes the place of a group with a failed episode, and the
    group is kept in `rejected` until the next batch, for the record.

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
        watchdog: Watchdog | None = None,
    ) -> None:
        self.settings = settings
        self._run_async = run_async
        self._tasks = tasks
        self._agents = agents
        self._contexts = contexts
        self._sampling = sampling
        self._is_fixed = is_fixed
        self._watchdog = watchdog or Watchdog()
        self._next_index = 0
        self.rejected: list[Group] = []

    def get_batch(self, num_trajectories: int) -> list[Group]:
        """Plays and returns `num_trajectories` trajectories in complete groups, ordered by group index.

        Whatever ends it early, the position in the tasks is then what it was: the next batch plays the same ones.

        Raises:
            RolloutError: more than `max_failed_fraction` of them failed for good.
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
        try:
            return self._run_async(self._collect(num_trajectories // self.settings.group_size))
        except BaseException:  # Ctrl-C too: a step that is dropped is played again
            self._next_index = start
            raise

    async def _collect(self, num_groups: int) -> list[Group]:
        failures = _Failures(allowed=self.settings.max_failed_fraction * num_groups * self.settings.group_size)
        kept: dict[int, Group] = {}
        rejected: dict[int, Group] = {}
        running: dict[asyncio.Task[Group], int] = {}
        try:
            while len(kept) < num_groups:
                while len(running) < self.settings.max_concurrent_groups and len(kept) + len(running) < num_groups:
                    running[asyncio.create_task(self._group(self._next_index))] = self._next_index
                    self._next_index += 1
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for finished in sorted(done, key=running.__getitem__):
                    index = running.pop(finished)
                    group = finished.result()
                    is_whole = failures.add(group) == 0
                    (kept if is_whole or self._is_fixed else rejected)[index] = group
        finally:
            await _cancel(running)
            self.rejected = [rejected[index] for index in sorted(rejected)]
        return [kept[index] for index in sorted(kept)]

    async def _group(self, index: int) -> Group:
        task = self._tasks.task(index)
        episodes = [
            asyncio.create_task(self._episode(task, sibling), name=f"episode {task.id}/{sibling}")
            for sibling in range(self.settings.group_size)
        ]
        try:
            played = await asyncio.gather(*episodes)
        finally:
            # Only an error that ends the run comes here with episodes still going: failures are data.
            await _cancel(episodes)
        group = Group(task=task, trajectories=[t for trajectories in played for t in trajectories], index=index)
        _check_same_start(group)
        return group

    async def _episode(self, task: Task, sibling: int) -> list[Trajectory]:
        """One episode with its retries. The boundary at which an exception of agent or environment becomes data."""
        error = ""
        for attempt in range(1 + self.settings.max_env_retries):
            contexts = self._contexts(f"{task.id}/{sibling}/{attempt}")
            try:
                async with self._limit(task.tag):
                    sampling = sibling_sampling(self._sampling, task, sibling)
                    trajectories = await self._agents[task.tag].run(task, sibling, contexts, sampling)
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
        """The position in the sequence of tasks."""
        return {"next_index": self._next_index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next_index = state["next_index"]


class _Failures:
    """Counts failed episodes of one batch and stops the run when there are too many."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, group: Group) -> int:
        """Counts the failed episodes of a group and returns how many.

        Raises:
            RolloutError: there are now more than allowed.
        """
        errors = [trajectory.error for trajectory in group.trajectories if trajectory.error is not None]
        for error in errors:
            kind = _headline(error).replace(group.task.id, "…")
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
        return len(errors)


def _check_same_start(group: Group) -> None:
    # Sub-agents of a sibling start where they are called.
    first_of = {trajectory.sibling: trajectory for trajectory in reversed(group.trajectories)}
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


def _headline(error: str) -> str:
    """What went wrong: the last line of a traceback. The stacks below a message are indented, and so are its own."""
    return next((line for line in reversed(error.splitlines()) if not line.startswith(" ")), "")
