"""Places each reward of an episode on a response token."""

from __future__ import annotations

from typing import Literal

import numpy as np

from turnwise.algorithms.response_tokens import Array, ResponseTokens

Placement = Literal["turn", "final"]


def place_rewards(tokens: ResponseTokens, placement: Placement) -> Array:
    """The rewards of the tokens [R]: each turn's reward on its last token, or all rewards on the episode's last token."""
    if placement == "turn":
        return turn_rewards(tokens)
    return final_rewards(tokens, np.array([trajectory.score for trajectory in tokens.trajectories], dtype=np.float64))


def turn_rewards(tokens: ResponseTokens) -> Array:
    """r_k on the last token of turn k, [R]; the whole episode's rewards (`outcome_rewards`) on its last token.

    The reward of a turn without trained tokens (an empty or a greedy response) goes to the last trained turn before it, or to
    the first of all. No reward is lost: a trajectory's rewards add up to its score.
    """
    counts = np.array([len(trajectory.turns) for trajectory in tokens.trajectories], dtype=np.int64)
    of_turns = np.array([turn.reward for trajectory in tokens.trajectories for turn in trajectory.turns], dtype=np.float64)
    owner = np.repeat(np.arange(len(counts)), counts)
    trained = (np.cumsum(counts) - counts)[tokens.trajectory_of_turn] + tokens.turn_index
    before = np.searchsorted(trained, np.arange(len(of_turns)), side="right") - 1
    first = np.cumsum(tokens.num_turns) - tokens.num_turns
    is_credited = tokens.is_trained[owner]
    place = tokens.last[np.maximum(before, first[owner])[is_credited]]
    rewards = np.bincount(place, of_turns[is_credited], len(tokens.position)).astype(np.float64)
    outcomes = np.array([sum(trajectory.outcome_rewards.values()) for trajectory in tokens.trajectories], dtype=np.float64)
    return rewards + final_rewards(tokens, outcomes)


def final_rewards(tokens: ResponseTokens, scores: Array) -> Array:
    """The `scores` [T] on the last token of each trajectory, [R]."""
    rewards = np.zeros(len(tokens.position))
    rewards[tokens.ends] = scores[tokens.is_trained]
    return rewards
