"""The response tokens of a batch as one row, in the order in which they were sampled: what credit runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.types import FloatArray, Sample, Trajectory

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Steps(NamedTuple):
    """The S decisions of T trajectories that `of_token` [R] puts tokens together to."""

    of_token: Index
    first: Index
    """[S] the first token of each step, in whose state it was decided."""
    lengths: Index
    """[T] steps of each trajectory."""


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """R trained tokens of T trajectories, trajectory after trajectory and turn after turn, whatever contexts they lie in.

    Observations, template glue and padding are not among them. Trajectories without a trained token are left out.
    """

    samples: tuple[Sample, ...]
    """Those whose tokens these are; `position` runs over them laid one after another."""
    position: Index
    """[R] where each token lies in the samples."""
    turn: Index
    """[R] which of the K turns of the batch each token belongs to, 0 … K−1 ascending."""
    lengths: Index
    """[T] tokens of each trajectory."""
    num_turns: Index
    """[T] turns of each trajectory; they add up to K."""
    trajectories: tuple[Trajectory, ...]
    kept: Index
    """[T] which of the given trajectories these are."""
    turn_index: Index
    """[K] each turn's index in its trajectory's `turns`."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> ResponseTokens:
        """The tokens of the trajectories' samples."""
        samples: list[Sample] = []
        kept, lengths, num_turns = [], [], []
        positions: list[Index] = []
        turn_index: list[int] = []
        offset = 0
        for index, trajectory in enumerate(trajectories):
            spans = []
            for sample in trajectory.samples:
                spans += [(span.turn, offset, span, sample.response_mask) for span in sample.turn_spans]
                offset += sample.num_tokens
            samples += trajectory.samples
            found = []
            for turn, start, span, mask in sorted(spans, key=lambda entry: entry[0]):
                tokens = np.flatnonzero(mask[span.start : span.stop]) + span.start + start
                if len(tokens):
                    found.append(tokens)
                    turn_index.append(turn)
            if found:
                kept.append(index)
                lengths.append(sum(len(tokens) for tokens in found))
                num_turns.append(len(found))
                positions += found
        return cls(
            samples=tuple(samples),
            position=np.concatenate(positions) if positions else np.zeros(0, np.int64),
            turn=np.repeat(np.arange(len(positions)), [len(tokens) for tokens in positions]),
            lengths=np.array(lengths, np.int64),
            num_turns=np.array(num_turns, np.int64),
            trajectories=tuple(trajectories[index] for index in kept),
            kept=np.array(kept, np.int64),
            turn_index=np.array(turn_index, np.int64),
        )

    @property
    def last(self) -> Index:
        """[K] the last token of each turn."""
        return np.searchsorted(self.turn, np.arange(len(self.turn_index)), side="right") - 1

    @property
    def ends(self) -> Index:
        """[T] the last token of each trajectory."""
        return np.cumsum(self.lengths) - 1

    def steps(self, granularity: Literal["token", "turn"]) -> Steps:
        """The decisions that are credited: each token, or each turn as a whole."""
        if granularity == "token":
            each = np.arange(len(self.position))
            return Steps(of_token=each, first=each, lengths=self.lengths)
        first = np.searchsorted(self.turn, np.arange(len(self.turn_index)), side="left")
        return Steps(of_token=self.turn, first=first, lengths=self.num_turns)

    def gather(self, arrays: Sequence[FloatArray | Array]) -> Array:
        """The tokens' entries [R] of one array [N] a sample. Nothing outside the response mask is read."""
        return np.concatenate(arrays)[self.position].astype(np.float64) if len(arrays) else np.zeros(0)

    def scatter(self, values: Array) -> list[FloatArray]:
        """One array [N] a sample with `values` [R] at the tokens, 0 elsewhere."""
        lengths = [sample.num_tokens for sample in self.samples]
        flat = np.zeros(sum(lengths), np.float32)
        flat[self.position] = values
        return [part.copy() for part in np.split(flat, np.cumsum(lengths)[:-1])]


def turn_rewards(tokens: ResponseTokens) -> Array:
    """r_k on the last token of turn k, [R]; what the whole episode earned (`outcome_rewards`) on its last token.

    The reward of a turn without trained tokens (an empty or a greedy response) goes to the last one before it, or to the
    first of all: none is lost, and the rewards of a trajectory add up to its score.
    """
    rewards = np.zeros(len(tokens.position))
    last_tokens = np.split(tokens.last, np.cumsum(tokens.num_turns)[:-1])
    trained_turns = np.split(tokens.turn_index, np.cumsum(tokens.num_turns)[:-1])
    for trajectory, last, trained in zip(tokens.trajectories, last_tokens, trained_turns, strict=False):
        of_turns = np.array([turn.reward for turn in trajectory.turns])
        place = np.searchsorted(trained, np.arange(len(of_turns)), side="right") - 1
        np.add.at(rewards, last[np.maximum(place, 0)], of_turns)
        rewards[last[-1]] += sum(trajectory.outcome_rewards.values())
    return rewards


def final_rewards(tokens: ResponseTokens, scores: Array) -> Array:
    """The `scores` [T] on the last token of each trajectory, [R]."""
    rewards = np.zeros(len(tokens.position))
    rewards[tokens.ends] = scores
    return rewards
