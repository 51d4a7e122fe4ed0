"""Plays groups of sibling episodes concurrently and hands them out in complete groups."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from turnwise.batching.samples import build_samples
from turnwise.errors import ConfigError, DeadlineError, EnvironmentFault, ReplicasDeadError, RolloutError
from turnwise.protocols import AgentLoop, OpenConversation
from turnwise.rollout.seeds import TaskSource, sibling_sampling
from turnwise.types import Group, SamplingParams, Task, Trajectory

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
    episode stays in its group as a failure; otherwise a group with a failed episode is dropped and another task takes its
    place.

    `run_async` waits for a coroutine on the run's event loop (`asyncio.Runner.run`).
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
    ) -> None:
        self.settings = settings
        self._run_async = run_async
        self._tasks = tasks
        self._agents = agents
        self._contexts = contexts
        self._sampling = sampling
        self._is_fixed = is_fixed
        self._next_index = 0

    def get_batch(self, num_trajectories: int) -> list[Group]:
        """Plays and returns `num_trajectories` trajectories in complete groups, ordered by group index.

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
        return self._run_async(self._collect(num_trajectories // self.settings.group_size))

    async def _collect(self, num_groups: int) -> list[Group]:
        failures = _Failures(allowed=self.settings.max_failed_fraction * num_groups * self.settings.group_size)
        kept: dict[int, Group] = {}
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
                    errors = [t.error for t in group.trajectories if t.error is not None]
                    failures.add(errors)
                    if self._is_fixed or not errors:
                        kept[index] = group
        finally:
            await _cancel(running)
        return [kept[index] for index in sorted(kept)]

    async def _group(self, index: int) -> Group:
        task = self._tasks.task(index)
        # A TaskGroup would cancel the siblings of an episode that failed; failures are data here.
        episodes = await asyncio.gather(*(self._episode(task, s) for s in range(self.settings.group_size)))
        group = Group(task=task, trajectories=[t for episode in episodes for t in episode], index=index)
        _check_same_start(group)
        return group

    async def _episode(self, task: Task, sibling: int) -> list[Trajectory]:
        """One episode with its retries. The boundary at which an exception of agent or environment becomes data."""
        error = ""
        for attempt in range(1 + self.settings.max_env_retries):
            contexts = self._contexts(f"{task.id}/{sibling}/{attempt}")
            try:
                async with asyncio.timeout(self.settings.episode_timeout_s):
                    sampling = sibling_sampling(self._sampling, task, sibling)
                    trajectories = await self._agents[task.tag].run(task, sibling, contexts, sampling)
                contexts.verify()
                for trajectory in trajectories:
                    trajectory.samples = build_samples(trajectory)
                return trajectories
            except (ConfigError, DeadlineError, ReplicasDeadError):
                raise
            except TimeoutError:
                error = (
                    f"episode {task.id}, sibling {sibling}: no end within episode_timeout_s = "
                    f"{self.settings.episode_timeout_s} s; the agent loop of tag {task.tag!r} was waited for"
                )
            except RolloutError as fault:
                # Not a matter of chance: the same prompt would be as long in a second attempt.
                error = str(fault)
                break
            except Exception as fault:
                error = "".join(traceback.format_exception(fault)).rstrip()
            finally:
                await contexts.close()
            logger.warning("episode %s, sibling %d, attempt %d failed: %s", task.id, sibling, attempt + 1, _last_line(error))
        return [Trajectory(task=task, sibling=sibling, status="failed", error=error)]

    def state_dict(self) -> dict[str, int]:
        """The position in the sequence of tasks."""
        return {"next_index": self._next_index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next_index = state["next_index"]


class _Failures:
    """Counts failed episodes of one batch and stops the run when there are too many."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._errors: Counter[str] = Counter()

    def add(self, errors: list[str]) -> None:
        self._errors.update(errors)
        if self._errors.total() > self._allowed:
            error, count = self._errors.most_common(1)[0]
            raise RolloutError(
                f"{self._errors.total()} episodes of this batch failed after their retries, more than "
                f"max_failed_fraction allows ({self._allowed:g}). The most frequent error ({count}×):\n{error}\n"
                "Mend the environment, or raise max_failed_fraction or max_env_retries of its environment manager."
            )


def _check_same_start(group: Group) -> None:
    starts = {t.turns[0].observation for t in group.trajectories if t.turns}
    if len(starts) > 1:
        first, second, *_ = sorted(starts)
        raise EnvironmentFault(
            f"the siblings of {group.task.id} were all reset with seed {group.task.seed} but start differently:\n"
            f"{first}\n-- and --\n{second}\n"
            "reset(seed=...) must determine the whole start state; group statistics mean nothing otherwise"
        )


async def _cancel(running: Mapping[asyncio.Task[Group], int]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _last_line(error: str) -> str:
    return error.splitlines()[-1] if error else ""
