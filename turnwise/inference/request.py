"""Requests inside a server, the checks that all servers run on them, and their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turnwise.errors import ServerError
from turnwise.types import Completion, FinishReason, FloatArray, IntArray, Media, SamplingParams, VersionRun
from turnwise.types.completion import KeptIds, join_kept_ids

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""
_NO_IDS = np.zeros(0, np.int64)
_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class Request:
    """A request for one response in the conversation `request_id`."""

    request_id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    partial_ids: IntArray = field(default_factory=lambda: _NO_IDS)
    """The response's tokens from before an interruption."""
    token_ids: IntArray = field(default_factory=lambda: _NO_IDS)
    """The tokens sampled for this request, after the partial ones."""
    logprobs: FloatArray = field(default_factory=lambda: _NO_LOGPROBS)
    kept_ids: list[KeptIds] = field(default_factory=list)
    """For each sampled token, the ids that it was drawn from; empty unless `sampling.keeps_ids`."""
    versions: tuple[VersionRun, ...] = ()
    """The weight versions of the first sampled tokens. `completion` receives the version of the rest as an
    argument."""

    @property
    def context_ids(self) -> IntArray:
        """The prompt and the partial tokens."""
        if len(self.partial_ids) == 0:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, self.partial_ids))

    @property
    def response_ids(self) -> IntArray:
        """The partial and the sampled tokens."""
        if len(self.partial_ids) == 0:
            return self.token_ids
        return np.concatenate((self.partial_ids, self.token_ids))

    def hits_stop_string(self, response_ids: IntArray, decode: Decode | None) -> bool:
        """Whether the text of a response contains one of this request's stop strings."""
        if not self.sampling.stop_strings:
            return False
        assert decode is not None, "checked with the request"
        text = decode(response_ids.tolist())
        return any(stop in text for stop in self.sampling.stop_strings)

    def versions_with(self, version: int, num_tokens: int) -> tuple[VersionRun, ...]:
        """The version runs of the first `num_tokens` sampled tokens. Tokens that `versions` doesn't cover get
        `version`."""
        num_versioned = sum(run.num_tokens for run in self.versions)
        return append_run(self.versions, version, num_tokens - num_versioned)

    def completion(self, reason: FinishReason, version: int, generate_s: float) -> Completion:
        """The sampled tokens as a completion. Tokens that `versions` doesn't cover get `version`."""
        versions = self.versions_with(version, len(self.token_ids))
        kept_ids, kept_offsets = join_kept_ids((ids, np.array([0, len(ids)]), 1) for ids in self.kept_ids)
        return Completion(
            self.token_ids,
            self.logprobs,
            reason,
            versions,
            generate_s,
            kept_ids,
            kept_offsets,
        )


class Finished(NamedTuple):
    """A request that is over."""

    request: Request
    reason: FinishReason
    version: int
    """The version of the weights that sampled its last tokens."""


def join(pieces: Sequence[Completion]) -> Completion:
    """Joins the pieces of a response, in order."""
    if len(pieces) == 1:
        return pieces[0]
    versions: tuple[VersionRun, ...] = ()
    for piece in pieces:
        for run in piece.versions:
            versions = append_run(versions, run.version, run.num_tokens)
    kept_ids, kept_offsets = join_kept_ids(
        (piece.kept_ids, piece.kept_offsets, len(piece.token_ids)) for piece in pieces
    )
    return Completion(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        pieces[-1].finish_reason,
        versions,
        sum(piece.generate_s for piece in pieces),
        kept_ids,
        kept_offsets,
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


def check_request(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    request_id: str,
    media: Sequence[Media],
    partial_ids: Sequence[int] = (),
    *,
    vocab_size: int,
    max_length: int,
    can_decode: bool,
) -> Request:
    """Makes a request. Raises ServerError if it can't be served."""
    prompt = np.array(prompt_ids, np.int64)
    partial = np.array(partial_ids, np.int64) if partial_ids else _NO_IDS
    request = Request(request_id, prompt, sampling, partial)
    problem: str | None = "its prompt is empty"
    if len(prompt):
        problem = _prompt_problem(request.context_ids, vocab_size, max_length) or _sampling_problem(sampling)
    if len(partial) and len(partial) >= sampling.max_new_tokens:
        problem = f"it continues after {len(partial)} tokens, and max_new_tokens is {sampling.max_new_tokens}"
    if media:
        problem = "it has images, which this server can't use yet; use an environment that renders text"
    if sampling.stop_strings and not can_decode:
        problem = "it has stop_strings, but this server wasn't given a `decode` function; use stop_token_ids"
    if problem:
        raise ServerError(f"the request of conversation {request_id!r} can't be served: {problem}")
    return request


def _prompt_problem(prompt_ids: IntArray, vocab_size: int, max_length: int) -> str | None:
    # As unsigned numbers, negative ids are large: one pass finds ids that are too small or too large.
    if prompt_ids.view(np.uint64).max() >= vocab_size:
        wrong = int(prompt_ids[(prompt_ids < 0) | (prompt_ids >= vocab_size)][0])
        return f"its prompt has token id {wrong}; the model's ids are 0 to {vocab_size - 1}"
    if len(prompt_ids) + 1 > max_length:
        return (
            f"its prompt of {len(prompt_ids)} tokens leaves no room for a response within {max_length} "
            "tokens; shorten the prompt or raise sequence_length"
        )
    return None


def _sampling_problem(sampling: SamplingParams) -> str | None:
    allowed = {
        "max_new_tokens": (sampling.max_new_tokens >= 1, "at least 1"),
        "temperature": (sampling.temperature >= 0, "0 (greedy) or more"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "top_k": (sampling.top_k >= 0, "0 (off) or more"),
        "min_p": (0 <= sampling.min_p <= 1, "in [0, 1], 0 being off"),
        "repetition_penalty": (sampling.repetition_penalty > 0, "above 0"),
        "seed": (0 <= sampling.seed < 2**64, "in [0, 2**64)"),
    }
    for name, (is_allowed, bounds) in allowed.items():
        if not is_allowed:
            return f"{name} is {getattr(sampling, name)}; it must be {bounds}"
    return None
