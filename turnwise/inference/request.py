"""A request as a server in this process sees it, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turnwise.types import FinishReason, FloatArray, IntArray, SamplingParams, VersionRun


def no_ids() -> IntArray:
    return np.zeros(0, np.int64)


def no_logprobs() -> FloatArray:
    return np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class Request:
    """One response to be sampled for the conversation `request_id`, and its tokens from before an interruption."""

    request_id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    partial_ids: IntArray = field(default_factory=no_ids)
    partial_logprobs: FloatArray = field(default_factory=no_logprobs)
    versions: tuple[VersionRun, ...] = ()
    """Runs of the partial tokens."""

    @property
    def context_ids(self) -> IntArray:
        return np.concatenate((self.prompt_ids, self.partial_ids)) if len(self.partial_ids) else self.prompt_ids

    def keep(self, token_ids: IntArray, logprobs: FloatArray, version: int) -> None:
        """Makes all response tokens so far the partial ones; those that are new were sampled by `version`."""
        self.versions = append_run(self.versions, version, len(token_ids) - len(self.partial_ids))
        self.partial_ids, self.partial_logprobs = token_ids, logprobs

    def restart(self) -> None:
        """Forgets the partial tokens."""
        self.partial_ids, self.partial_logprobs, self.versions = no_ids(), no_logprobs(), ()


class Finished(NamedTuple):
    """A request that is over. Its response is the partial tokens."""

    request: Request
    reason: FinishReason


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
