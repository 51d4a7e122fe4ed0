"""Episodes by hand, estimators by their name in `spec`, and definitions in loops that share no code with the
package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.algorithms.estimator import Estimator
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.batching.samples import build_samples
from turnwise.errors import ConfigError
from turnwise.runtime.entry_points import load_class
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Task, Trajectory, Turn

TASK = Task(id="t", tag="T", split="train", seed=0)


def build(name: str, **settings: Any) -> Estimator:
    built: Any = load_class(ESTIMATORS[name].entry, "adv_estimator", ConfigError)
    return built(AlgorithmSettings(adv_estimator=name, **settings))


def episode(
    rewards: Sequence[float],
    states: Sequence[Any] | None = None,
    lengths: Sequence[int] | int = 1,
    prompt: int = 1,
    sibling: int = 0,
    is_stepwise: bool = False,
    **fields: Any,
) -> Trajectory:
    """One turn a reward, each of `lengths` sampled tokens after a prompt of `prompt` tokens."""
    lengths = [lengths] * len(rewards) if isinstance(lengths, int) else lengths
    turns = [
        Turn(
            prompt_ids=np.arange(prompt),
            response_ids=np.arange(length),
            logprobs=np.zeros(length, np.float32),
            reward=reward,
            state_key=state,
            observation=str(state),
            starts_context=is_stepwise,
        )
        for reward, state, length in zip(rewards, states or range(len(rewards)), lengths, strict=True)
    ]
    trajectory = Trajectory(TASK, sibling, turns=turns, **fields)
    trajectory.samples = build_samples(trajectory)
    return trajectory


def group_of(*trajectories: Trajectory) -> Group:
    return Group(TASK, list(trajectories))


def trained(trajectory):
    """`[[(sample, position), …] of each turn]`, for turns with a trained token, with the turns' indices."""
    found = []
    for sample in trajectory.samples:
        for span in sample.turn_spans:
            tokens = [(sample, p) for p in range(span.start, span.stop) if sample.response_mask[p]]
            if tokens:
                found.append((span.turn, tokens))
    found.sort(key=lambda entry: entry[0])
    return [turn for turn, _ in found], [tokens for _, tokens in found]


def token_rewards(trajectory, placement, kl):
    """One a trained token, in order, as lists by turn."""
    turns, tokens = trained(trajectory)
    rewards = [[0.0] * len(of_turn) for of_turn in tokens]
    if placement == "final":
        rewards[-1][-1] = trajectory.score
    else:
        for index, turn in enumerate(trajectory.turns):
            before = [k for k, t in enumerate(turns) if t <= index]
            rewards[before[-1] if before else 0][-1] += turn.reward
        rewards[-1][-1] += sum(trajectory.outcome_rewards.values())
    return [
        [r - kl(*token) for r, token in zip(rs, ts, strict=True)]
        for rs, ts in zip(rewards, tokens, strict=True)
    ]


def gae_by_hand(rewards, values, last_value, gamma, lambd):
    advantages, following, advantage = [], last_value, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lambd * advantage
        following = value
        advantages.append(advantage)
    return advantages[::-1]
