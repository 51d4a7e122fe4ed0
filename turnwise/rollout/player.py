"""Plays one group: sibling episodes with their seeds and retries. A failed episode becomes a trajectory with
an error."""

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Real
from typing import Any, Protocol

from turnwise.batching.samples import build_samples
from turnwise.envs.contract import check_numbers
from turnwise.errors import (
    BlockingFault,
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    EnvWorkersDeadError,
    ReplicasDeadError,
    RolloutError,
    TurnwiseError,
    counted,
)
from turnwise.protocols import AgentLoop, OpenConversation, PlaysInPlaces
from turnwise.rollout.failures import headline
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.source import played_of
from turnwise.rollout.tasks import sibling_sampling
from turnwise.runtime.foreign import Foreign, is_cancelled
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Group, SamplingParams, Task, Trajectory

logger = logging.getLogger(__name__)

_ROUNDING = 1e-6

EpisodeTask = asyncio.Task[list[Trajectory]]


class EpisodeContexts(OpenConversation, Protocol):
    """Opens the contexts of one episode, and releases their KV cache on the servers after the episode."""

    def verify(self) -> None:
        """Raises RolloutError if the tokens of a context's turns aren't those that the server saw."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class GroupPlayer:
    """Plays groups on the run's event loop. `agents` returns a task's agent; `contexts` takes an episode's id
    and returns the episode's contexts. `watchdog` ends late episodes. `on_end` is called with a group's index
    when one of its episodes ends."""

    agents: Callable[[Task], AgentLoop]
    contexts: Callable[[str], EpisodeContexts]
    sampling: SamplingParams
    settings: SchedulerSettings
    watchdog: Watchdog
    on_end: Callable[[int], None]

    async def play(
        self,
        task: Task,
        index: int,
        note_failure: Callable[[list[Trajectory]], None],
    ) -> Group:
        """Plays the task as group `index`. If cancelled, ends all episodes first. If an episode fails after
        its retries and no redundant sibling can replace it, calls `note_failure` at once, which may raise an
        error to end the run."""
        size = self.settings.group_size
        redundancy = self.settings.group_size_redundancy
        num_sampled = size + redundancy
        samplings = [self.sampling] * num_sampled
        if self.settings.has_greedy_sibling:
            samplings.append(replace(self.sampling, do_sample=False))
        num_spare = redundancy

        async def noted(sibling: int, sampling: SamplingParams) -> list[Trajectory]:
            nonlocal num_spare
            trajectories = await self._episode(task, sibling, sibling_sampling(sampling, task, sibling))
            self.on_end(index)
            if _has_failed(trajectories):
                if sibling >= num_sampled or not num_spare:
                    note_failure(trajectories)
                else:
                    num_spare -= 1
            return trajectories

        episodes = [
            asyncio.create_task(noted(sibling, sampling), name=f"episode {task.id}/{sibling}")
            for sibling, sampling in enumerate(samplings)
        ]
        try:
            if redundancy:
                await _quickest(episodes[:num_sampled], size)
                await cancel(episodes[:num_sampled])
            uncancelled = [episode for episode in episodes if not episode.cancelled()]
            played = await asyncio.gather(*uncancelled)
        finally:
            # A failed episode raises nothing: episodes still play here only if the group is cancelled or an
            # error ends the run.
            await cancel(episodes)
        # All trajectories of one episode have the episode's score, so any of them can be the baseline.
        greedy = None
        if self.settings.has_greedy_sibling:
            greedy = next(iter(played.pop()), None)
        failed_last = sorted(range(len(played)), key=lambda sibling: _has_failed(played[sibling]))
        siblings = sorted(failed_last[:size])
        trajectories = chain.from_iterable(played[sibling] for sibling in siblings)
        group = Group(task, list(trajectories), index, greedy)
        _check_same_start(group)
        return group

    async def _episode(
        self,
        task: Task,
        sibling: int,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """Plays one episode with its retries. Exceptions become a failed trajectory, except for those that
        end the run and those raised while a cancelled episode is cleaned up."""
        error = ""
        for attempt in range(1 + self.settings.max_env_retries):
            contexts = self.contexts(f"{task.id}/{sibling}/{attempt}")
            try:
                return await self._attempt(task, sibling, contexts, sampling)
            except (ConfigError, DeadlineError, EnvWorkersDeadError, ReplicasDeadError):
                raise
            except Exception as fault:
                if is_cancelled():  # the fault of a clean-up has taken the place of the cancellation
                    raise asyncio.CancelledError from fault
                if isinstance(fault, TurnwiseError):
                    error = str(fault)
                else:
                    error = "".join(traceback.format_exception(fault)).rstrip()
                logger.warning(
                    "episode %s, sibling %d, attempt %d failed: %s",
                    task.id,
                    sibling,
                    attempt + 1,
                    headline(error),
                )
                # A prompt that was too long stays too long, and a call that blocks would hold up all other
                # episodes again.
                if isinstance(fault, RolloutError | BlockingFault):
                    break
            finally:
                await contexts.close()
        return [Trajectory(task=task, sibling=sibling, status="failed", error=error)]

    async def _attempt(
        self,
        task: Task,
        sibling: int,
        contexts: EpisodeContexts,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """Plays one episode once, and returns its checked trajectories with their samples."""
        limit = self.watchdog.waiting(
            "the rollouts",
            f"an episode of {task.tag} to end",
            self.settings.episode_timeout_s,
            "episode_timeout_s",
            EnvironmentFault,
        )
        agent = self.agents(task)
        async with _place(agent), limit:
            with Foreign(f"the agent of {task.tag}"):
                trajectories = await agent.run(task, sibling, contexts, sampling)
        contexts.verify()
        if not trajectories:
            raise EnvironmentFault(
                f"the agent of {task.tag} returned no trajectory; its `run` returns at least one"
            )
        check_weights(trajectories, f"the agent {type(agent).__name__} of {task.tag}")
        for trajectory in trajectories:
            check_numbers(trajectory, f"the agent of {task.tag}")
            trajectory.samples = build_samples(trajectory, self.sampling.temperature)
        return trajectories


def _place(agent: AgentLoop) -> AbstractAsyncContextManager[None]:
    """A place to play in, for an agent that has a limited number."""
    if isinstance(agent, PlaysInPlaces) and agent.places is not None:
        return agent.places
    return nullcontext()


async def _quickest(episodes: Sequence[EpisodeTask], num_required: int) -> None:
    """Waits until `num_required` episodes have ended without failure, or all have ended. Raises an episode's
    exception."""
    num_well = 0
    pending = set(episodes)
    while pending and num_well < num_required:
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        num_well += sum(not _has_failed(episode.result()) for episode in ended)


def check_weights(trajectories: Sequence[Trajectory], agent: str) -> None:
    """Raises EnvironmentFault unless the weights of one episode's trajectories are numbers ≥ 0 that add up to
    1. By any other sum one episode would count as several, or as a part of one, in statistics and losses."""
    weights = [trajectory.weight for trajectory in trajectories]
    for weight in weights:
        if not isinstance(weight, Real) or not weight >= 0:
            raise EnvironmentFault(
                f"{agent} returned a trajectory of weight {weight!r}; a weight is a number ≥ 0"
            )
    total = math.fsum(weights)
    if abs(total - 1.0) > _ROUNDING:
        advice = "give it weight=1"
        if len(weights) > 1:
            advice = f"give each of the {len(weights)} its share, such as weight={1 / len(weights):.3g}"
        raise EnvironmentFault(
            f"{agent} returned {counted(len(weights), 'trajectory')} for one episode, whose weights add up "
            f"to {total:g}; they must add up to 1: {advice}"
        )


def _has_failed(trajectories: Iterable[Trajectory]) -> bool:
    return any(trajectory.error is not None for trajectory in trajectories)


def _check_same_start(group: Group) -> None:
    # Only the first trajectory of a sibling is compared: the others may be of sub-agents, which start later
    # in the episode.
    played = [trajectory for trajectory in played_of(group) if not _starts_at_once(trajectory)]
    first_of = {trajectory.sibling: trajectory for trajectory in reversed(played)}
    first_turns = [trajectory.turns[0] for trajectory in first_of.values() if trajectory.turns]
    starts = {turn.observation for turn in first_turns}
    if len(starts) > 1:
        first, second, *_ = sorted(starts)
        raise EnvironmentFault(
            f"the siblings of {group.task.id} were all reset with seed {group.task.seed} but start "
            f"differently:\n{first}\n-- and --\n{second}\n"
            "reset(seed=...) must determine the whole start state; group statistics mean nothing otherwise"
        )


def _starts_at_once(trajectory: Trajectory) -> bool:
    """Whether it is a tree of several conversations: which of them is answered first is a matter of time."""
    is_tree = trajectory.answer_turn is not None
    return is_tree and sum(turn.starts_context for turn in trajectory.turns) > 1


async def cancel(running: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels asyncio tasks and waits for their end, so that nothing is left on the event loop."""
    tasks = list(running)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
