"""The response tokens of a batch in the order of sampling, their rewards, discounted sums and advantage
estimation (GAE). Observations, template tokens and padding are left out, so no credit passes through them.
Arrays in `discounted_sums` and `gae` have an entry per step (token or turn), trajectory after trajectory;
`lengths` [T] counts the steps of each trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.types import FloatArray, Sample, Trajectory

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Decisions(NamedTuple):
    """The S decisions (single tokens, or whole turns) of T trajectories."""

    of_token: Index  # [R] the index of each token's decision
    first: Index  # [S] the first token of each decision; the decision is made in the state before that token
    lengths: Index  # [T] decisions of each trajectory

    def sums(self, values: Array) -> Array:
        """Σ of the tokens' `values` [R] within each decision, [S]."""
        return np.bincount(self.of_token, values, len(self.first)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """The R trained tokens of T trajectories, ordered by trajectory and turn, even if a turn lies in a later
    context than the turns after it. K turns have a trained token; a trajectory may have none."""

    trajectories: tuple[Trajectory, ...]
    samples: tuple[Sample, ...]
    """All samples of the trajectories, in their order; `position` indexes their concatenation."""
    position: Index  # [R] each token's position in the samples
    turn: Index  # [R] each token's turn among the K, 0 … K−1 ascending
    turn_index: Index  # [K] each turn's index in its trajectory's `turns`
    lengths: Index  # [T] tokens of each trajectory
    num_turns: Index  # [T] turns of each trajectory that have a trained token; they add up to K

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "ResponseTokens":
        """The tokens of the trajectories' samples."""
        samples: list[Sample] = []
        spans: list[tuple[int, int, int, int]] = []
        offset = 0
        for index, trajectory in enumerate(trajectories):
            for sample in trajectory.samples:
                for span in sample.turn_spans:
                    spans.append((index, span.turn, offset + span.start, offset + span.stop))
                offset += sample.num_tokens
            samples += trajectory.samples
        table = np.array(spans, np.int64).reshape(-1, 4)
        by_trajectory_and_turn = np.lexsort((table[:, 1], table[:, 0]))
        trajectory_of, turn_of, start, stop = table[by_trajectory_and_turn].T
        span_lengths = stop - start
        span_of = np.repeat(np.arange(len(start)), span_lengths)
        # Of the spans, joined one after the other, token i has the position i + shift of its span.
        shift = stop - np.cumsum(span_lengths)
        position = np.arange(len(span_of)) + np.repeat(shift, span_lengths)
        mask = _joined_masks(samples)
        is_trained = mask[position]
        num_trained = np.bincount(span_of[is_trained], minlength=len(start))
        trained_turns = np.flatnonzero(num_trained)
        return cls(
            trajectories=tuple(trajectories),
            samples=tuple(samples),
            position=position[is_trained],
            turn=np.repeat(np.arange(len(trained_turns)), num_trained[trained_turns]),
            turn_index=turn_of[trained_turns],
            lengths=np.bincount(trajectory_of, num_trained, len(trajectories)).astype(np.int64),
            num_turns=np.bincount(trajectory_of[trained_turns], minlength=len(trajectories)),
        )

    @property
    def last(self) -> Index:
        """[K] the last token of each turn."""
        turns = np.arange(len(self.turn_index))
        return np.searchsorted(self.turn, turns, side="right") - 1

    @property
    def is_trained(self) -> NDArray[np.bool_]:
        """[T] whether the trajectory has a trained token."""
        return self.lengths > 0

    @property
    def ends(self) -> Index:
        """For each trajectory with a trained token, in order: the index of its last one among the R
        tokens."""
        return np.cumsum(self.lengths)[self.is_trained] - 1

    @property
    def scores(self) -> Array:
        """[T] the sum of the raw rewards of each trajectory."""
        return np.array([trajectory.score for trajectory in self.trajectories], dtype=np.float64)

    @property
    def weights(self) -> Array:
        """[T] the weight of each trajectory. If one run of an agent returns several trajectories, their
        weights add up to 1."""
        return np.array([trajectory.weight for trajectory in self.trajectories], dtype=np.float64)

    @property
    def trajectory_of_turn(self) -> Index:
        """[K] each turn's trajectory among the T."""
        return np.repeat(np.arange(len(self.trajectories)), self.num_turns)

    def steps(self, granularity: Literal["token", "turn"]) -> Decisions:
        """The decisions that get credit: each token, or each turn as a whole."""
        if granularity == "token":
            each = np.arange(len(self.position))
            return Decisions(of_token=each, first=each, lengths=self.lengths)
        turns = np.arange(len(self.turn_index))
        first = np.searchsorted(self.turn, turns, side="left")
        return Decisions(of_token=self.turn, first=first, lengths=self.num_turns)

    def totals(self, values: Array) -> Array:
        """Σ of the tokens' `values` [R] in each trajectory, [T]."""
        num_trajectories = len(self.trajectories)
        of_token = np.repeat(np.arange(num_trajectories), self.lengths)
        return np.bincount(of_token, values, num_trajectories).astype(np.float64)

    def gather(self, arrays: Sequence[FloatArray | None]) -> Array | None:
        """The entries [R] of `arrays`, one [N] per sample, at the tokens. None if a sample with trained
        tokens has no array."""
        if not self.samples:
            return np.zeros(0)
        parts: list[FloatArray] = []
        for sample, array in zip(self.samples, arrays, strict=True):
            if array is not None:
                parts.append(array)
            elif sample.num_trained:
                return None
            else:
                parts.append(np.zeros(sample.num_tokens, np.float32))
        return np.concatenate(parts)[self.position].astype(np.float64)

    def scatter(self, values: Array) -> list[FloatArray]:
        """One array [N] per sample with `values` [R] at the tokens, 0 elsewhere."""
        lengths = [sample.num_tokens for sample in self.samples]
        edges = np.cumsum([0, *lengths]).tolist()
        flat = np.zeros(edges[-1], np.float32)
        flat[self.position] = values
        return [flat[start:stop].copy() for start, stop in pairwise(edges)]


def _joined_masks(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    if not samples:
        return np.zeros(0, np.bool_)
    return np.concatenate([sample.response_mask for sample in samples])


RewardPlacement = Literal["turn", "final"]


def place_rewards(tokens: ResponseTokens, reward_placement: RewardPlacement) -> Array:
    """The rewards of the tokens [R]: each turn's reward on its last token, or the score on the trajectory's
    last token."""
    if reward_placement == "turn":
        return turn_rewards(tokens)
    return final_rewards(tokens, tokens.scores)


def turn_rewards(tokens: ResponseTokens) -> Array:
    """r_k on the last token of turn k, [R]; the rewards of the whole episode (`outcome_rewards`) on its last
    token. The reward of a turn without trained tokens (an empty or a greedy response) goes to the last
    trained turn before it, else to the first trained turn, so that a trajectory's rewards add up to its
    score. A trajectory without trained tokens gets none."""
    trajectories = tokens.trajectories
    num_turns = np.array([len(trajectory.turns) for trajectory in trajectories], dtype=np.int64)
    reward_of_each = [turn.reward for trajectory in trajectories for turn in trajectory.turns]
    of_turns = np.array(reward_of_each, dtype=np.float64)
    owner = np.repeat(np.arange(len(num_turns)), num_turns)
    offsets = np.cumsum(num_turns) - num_turns
    trained = offsets[tokens.trajectory_of_turn] + tokens.turn_index
    turns = np.arange(len(of_turns))
    last_trained = np.searchsorted(trained, turns, side="right") - 1
    first_trained = np.cumsum(tokens.num_turns) - tokens.num_turns
    credited_turn = np.maximum(last_trained, first_trained[owner])
    is_credited = tokens.is_trained[owner]
    place = tokens.last[credited_turn[is_credited]]
    rewards = np.bincount(place, of_turns[is_credited], len(tokens.position)).astype(np.float64)
    episode_rewards = [sum(trajectory.outcome_rewards.values()) for trajectory in trajectories]
    outcomes = np.array(episode_rewards, dtype=np.float64)
    return rewards + final_rewards(tokens, outcomes)


def final_rewards(tokens: ResponseTokens, scores: Array) -> Array:
    """The `scores` [T] on the last token of each trajectory, [R]."""
    rewards = np.zeros(len(tokens.position))
    rewards[tokens.ends] = scores[tokens.is_trained]
    return rewards


def discounted_sums(x: Array, lengths: Index, discount: float) -> Array:
    """y_t = x_t + discount·y_{t+1} in each trajectory, with y = 0 after its end.

    >>> discounted_sums(np.array([0.0, 0, 1, 0, 0, 2]), np.array([6]), 0.5).tolist()
    [0.3125, 0.625, 1.25, 0.5, 1.0, 2.0]
    """
    trajectory = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.cumsum(lengths) - lengths
    step = np.arange(len(x)) - np.repeat(offsets, lengths)
    table = np.zeros((lengths.max(initial=0) + 1, len(lengths)))
    table[step, trajectory] = x
    for row in range(len(table) - 2, -1, -1):
        table[row] += discount * table[row + 1]
    return table[step, trajectory]


def gae(
    rewards: Array,
    values: Array,
    lengths: Index,
    gamma: float,
    lambd: float,
    last_values: Array | None = None,
) -> tuple[Array, Array]:
    """Advantages and returns of steps (Schulman et al. 2016, arXiv:1506.02438, eq. 16):

    δ_t = r_t + γV_{t+1} − V_t,  A_t = δ_t + γλA_{t+1},  returns = A + V.

    After a trajectory's last step, V is the trajectory's entry in `last_values` [T], by default 0.

    >>> rewards, values = np.array([0.0, 1, 0, 2]), np.array([0.2, 0.3, 0.5, 0.6])
    >>> advantages, returns = gae(rewards, values, np.array([4]), gamma=1.0, lambd=0.95)
    >>> advantages.round(6).tolist(), returns.round(6).tolist()
    ([2.530575, 2.5585, 1.43, 1.4], [2.730575, 2.8585, 1.93, 2.0])
    """
    has_steps = lengths > 0
    ends = np.cumsum(lengths)[has_steps] - 1
    following = np.zeros_like(values)
    following[:-1] = values[1:]
    following[ends] = 0.0 if last_values is None else last_values[has_steps]
    errors = rewards + gamma * following - values
    advantages = discounted_sums(errors, lengths, gamma * lambd)
    returns = advantages + values
    return advantages, returns
