"""The response tokens of a batch as one row, in the order of sampling, for credit."""

from __future__ import annotations

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
    """The S decisions of T trajectories; `of_token` [R] is each token's decision."""

    of_token: Index
    first: Index
    """[S] the first token of each step; its state is the step's."""
    lengths: Index
    """[T] steps of each trajectory."""

    def sums(self, values: Array) -> Array:
        """Σ of the tokens' `values` [R] within each step, [S]."""
        return np.bincount(self.of_token, values, len(self.first)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """R trained tokens of T trajectories, ordered by trajectory and turn, whatever contexts they lie in.

    Observations, template glue and padding are not among them. K turns have a trained token; a trajectory may have none.
    """

    trajectories: tuple[Trajectory, ...]
    samples: tuple[Sample, ...]
    """All samples of the trajectories, in order; `position` indexes their concatenation."""
    position: Index
    """[R] each token's position in the samples."""
    turn: Index
    """[R] each token's turn among the K, 0 … K−1 ascending."""
    turn_index: Index
    """[K] each turn's index in its trajectory's `turns`."""
    lengths: Index
    """[T] tokens of each trajectory."""
    num_turns: Index
    """[T] turns of each trajectory that have a trained token; they add up to K."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> ResponseTokens:
        """The tokens of the trajectories' samples."""
        samples: list[Sample] = []
        spans: list[tuple[int, int, int, int]] = []
        offset = 0
        for index, trajectory in enumerate(trajectories):
            for sample in trajectory.samples:
                spans += [(index, span.turn, offset + span.start, offset + span.stop) for span in sample.turn_spans]
                offset += sample.num_tokens
            samples += trajectory.samples
        table = np.array(spans, np.int64).reshape(-1, 4)
        trajectory_of, turn_of, start, stop = table[np.lexsort((table[:, 1], table[:, 0]))].T
        span_of = np.repeat(np.arange(len(start)), stop - start)
        position = np.arange(len(span_of)) + np.repeat(stop - np.cumsum(stop - start), stop - start)
        mask = np.concatenate([sample.response_mask for sample in samples]) if samples else np.zeros(0, np.bool_)
        is_trained = mask[position]
        num_trained = np.bincount(span_of[is_trained], minlength=len(start))
        kept = np.flatnonzero(num_trained)
        return cls(
            trajectories=tuple(trajectories),
            samples=tuple(samples),
            position=position[is_trained],
            turn=np.repeat(np.arange(len(kept)), num_trained[kept]),
            turn_index=turn_of[kept],
            lengths=np.bincount(trajectory_of, num_trained, len(trajectories)).astype(np.int64),
            num_turns=np.bincount(trajectory_of[kept], minlength=len(trajectories)),
        )

    @property
    def last(self) -> Index:
        """[K] the last token of each turn."""
        return np.searchsorted(self.turn, np.arange(len(self.turn_index)), side="right") - 1

    @property
    def is_trained(self) -> NDArray[np.bool_]:
        """[T] whether the trajectory has a trained token."""
        return self.lengths > 0

    @property
    def ends(self) -> Index:
        """The last token of each trajectory that is trained."""
        return np.cumsum(self.lengths)[self.is_trained] - 1

    @property
    def trajectory_of_turn(self) -> Index:
        """[K] each turn's trajectory among the T."""
        return np.repeat(np.arange(len(self.trajectories)), self.num_turns)

    def steps(self, granularity: Literal["token", "turn"]) -> Decisions:
        """The decisions that get credit: each token, or each turn as a whole."""
        if granularity == "token":
            each = np.arange(len(self.position))
            return Decisions(of_token=each, first=each, lengths=self.lengths)
        first = np.searchsorted(self.turn, np.arange(len(self.turn_index)), side="left")
        return Decisions(of_token=self.turn, first=first, lengths=self.num_turns)

    def totals(self, values: Array) -> Array:
        """Σ of the tokens' `values` [R] in each trajectory, [T]."""
        of_token = np.repeat(np.arange(len(self.trajectories)), self.lengths)
        return np.bincount(of_token, values, len(self.trajectories)).astype(np.float64)

    def gather(self, arrays: Sequence[FloatArray | None]) -> Array | None:
        """The tokens' entries [R] of one array [N] per sample, None if a sample with trained tokens has no array.

        Entries outside the response mask are not read.
        """
        known: list[FloatArray] = []
        for sample, array in zip(self.samples, arrays, strict=True):
            if array is None and sample.num_trained:
                return None
            known.append(np.zeros(sample.num_tokens, np.float32) if array is None else array)
        return np.concatenate(known)[self.position].astype(np.float64) if known else np.zeros(0)

    def scatter(self, values: Array) -> list[FloatArray]:
        """One array [N] per sample with `values` [R] at the tokens, 0 elsewhere."""
        edges = np.cumsum([0, *(sample.num_tokens for sample in self.samples)]).tolist()
        flat = np.zeros(edges[-1], np.float32)
        flat[self.position] = values
        return [flat[start:stop].copy() for start, stop in pairwise(edges)]
