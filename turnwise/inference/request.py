"""A request as a server in this process sees it, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turnwise.types import Completion, FinishReason, FloatArray, IntArray, KeptIds, SamplingParams, VersionRun, join_kept


def no_ids() -> IntArray:
    return np.zeros(0, np.int64)


def no_logprobs() -> FloatArray:
    return np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class Request:
    """One response to be sampled for the conversation `request_id`. `partial_ids` are its tokens from an earlier request."""

    request_id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    partial_ids: IntArray = field(default_factory=no_ids)
    token_ids: IntArray = field(default_factory=no_ids)
    """Sampled tokens, after the partial ones."""
    logprobs: FloatArray = field(default_factory=no_logprobs)
    kept: list[KeptIds] = field(default_factory=list)
    """The ids that each sampled token was drawn from, where `sampling.keeps_ids`."""

    @property
    def context_ids(self) -> IntArray:
        """What is there before the first token is sampled."""
        return np.concatenate((self.prompt_ids, self.partial_ids)) if len(self.partial_ids) else self.prompt_ids

    @property
    def response_ids(self) -> IntArray:
        """Partial and sampled tokens."""
        return np.concatenate((self.partial_ids, self.token_ids)) if len(self.partial_ids) else self.token_ids

    def completion(self, reason: FinishReason, version: int, generate_s: float) -> Completion:
        """The sampled tokens, all by the weights of `version`."""
        versions = append_run((), version, len(self.token_ids))
        kept = (np.zeros(0, np.int32), np.zeros(1, np.int64), 0) if self.sampling.keeps_ids else (None, None, 0)
        kept_ids, kept_offsets = join_kept([kept, *((ids, np.array([0, len(ids)]), 1) for ids in self.kept)])
        return Completion(self.token_ids, self.logprobs, reason, versions, generate_s, kept_ids, kept_offsets)


class Finished(NamedTuple):
    """A request that is over, and the version of the weights that sampled its tokens."""

    request: Request
    reason: FinishReason
    version: int


def join(pieces: Sequence[Completion]) -> Completion:
    """One completion of the pieces of a response, in order."""
    if len(pieces) == 1:
        return pieces[0]
    versions: tuple[VersionRun, ...] = ()
    for run in (run for piece in pieces for run in piece.versions):
        versions = append_run(versions, *run)
    return Completion(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        pieces[-1].finish_reason,
        versions,
        sum(piece.generate_s for piece in pieces),
        *join_kept((piece.kept_ids, piece.kept_offsets, len(piece.token_ids)) for piece in pieces),
    )


def append_run(runs: tuple[VersionRun, ...], version: int, num_tokens: int) -> tuple[VersionRun, ...]:
    """The runs with `num_tokens` more tokens of `version`.

    >>> append_run((VersionRun(3, 2),), 3, 5)
    (VersionRun(version=3, num_tokens=7),)
    """
    if num_tokens == 0:
        return runs
    if runs and runs[-1].version == version:
        return (*runs[:-1], VersionRun(version, runs[-1].num_tokens + num_tokens))
    return (*runs, VersionRun(version, num_tokens))
