"""Agents that play without a model, and schedulers for them."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.tasks import SeededTasks
from turnwise.types import SamplingParams, Trajectory, Turn, VersionRun


def number(task):
    """The index of the task's group."""
    return int(task.id.rpartition("/")[2])


class Contexts:
    """Counts the episodes whose contexts aren't closed."""

    num_open = 0

    def __init__(self, episode_id):
        Contexts.num_open += 1

    def __call__(self, sampling, *, parent=None, tools=()):
        raise AssertionError("these agents open no context")

    def verify(self):
        pass

    async def close(self):
        Contexts.num_open -= 1


class Agent:
    """Takes `num_turns(task, sibling)` turns of the event loop. Then it raises the error that `fails(task,
    sibling, attempt)` returns, or returns one trajectory of one turn, sampled with the `version` that there
    was at its start."""

    def __init__(
        self,
        fails=lambda task, sibling, attempt: None,
        num_turns=lambda task, sibling: 2 + 3 * (task.seed % 5) + sibling,
        observation=lambda task, sibling: str(task.seed),
        reward=lambda task, sibling: float(sibling),
    ):
        self.fails, self.num_turns, self.observation, self.reward = fails, num_turns, observation, reward
        self.version = self.num_running = self.max_running = 0
        self.started, self.ended = [], []
        """(index, sibling, seed) of each attempt that was begun, and (index, sibling) of each that ended
        well."""
        self.attempts = Counter()

    async def run(self, task, sibling, open_conversation, sampling):
        version, episode = self.version, (number(task), sibling)
        self.started.append((*episode, sampling.seed))
        self.attempts[episode] += 1
        attempt = self.attempts[episode]
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            for _ in range(self.num_turns(task, sibling)):
                await asyncio.sleep(0)
            if (fault := self.fails(task, sibling, attempt)) is not None:
                raise fault
        finally:
            self.num_running -= 1
        self.ended.append(episode)
        turn = Turn(
            prompt_ids=np.array([1, 2]),
            response_ids=np.array([3]),
            logprobs=np.array([-1.0], np.float32),
            versions=(VersionRun(version, 1),),
            observation=self.observation(task, sibling),
            reward=self.reward(task, sibling),
            starts_context=True,
            is_greedy=sampling.is_greedy,
        )
        return [Trajectory(task=task, sibling=sibling, turns=[turn])]


def make_scheduler(runner, agent, keep=None, tasks=None, is_fixed=False, parts=None, **settings):
    """A scheduler of groups of two, three at once. `parts` are further arguments, such as a stopwatch."""
    return RolloutScheduler(
        run_async=runner.run,
        tasks=tasks or SeededTasks(run_seed=1, split="train", tags=("A", "B"), partition=(1, 1)),
        agents=lambda task: agent,
        contexts=Contexts,
        sampling=SamplingParams(max_new_tokens=4),
        settings=SchedulerSettings(**({"group_size": 2, "max_concurrent_groups": 3} | settings)),
        is_fixed=is_fixed,
        keep=keep,
        **parts or {},
    )
