"""Checks common to all servers, with the same messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from turnwise.errors import NotAvailableError, ServerError
from turnwise.inference.request import Request
from turnwise.protocols import MemoryKind
from turnwise.types import IntArray, Media, SamplingParams


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
    """The request.

    Raises:
        ServerError: the request can't be served.
    """
    prompt, partial = np.array(prompt_ids, np.int64), np.array(partial_ids, np.int64)
    request = Request(request_id, prompt, sampling, partial)
    problem = _prompt_problem(prompt, vocab_size, max_length) or _sampling_problem(sampling)
    if not problem and len(partial):
        problem = _prompt_problem(request.context_ids, vocab_size, max_length)
    if len(partial) and len(partial) >= sampling.max_new_tokens:
        problem = f"it goes on after {len(partial)} tokens, and max_new_tokens is {sampling.max_new_tokens}"
    if media:
        problem = "it has images, which this server can't take yet; use an environment that renders text"
    if sampling.stop_strings and not can_decode:
        problem = "it has stop_strings, but this server wasn't given a `decode` function; use stop_token_ids"
    if problem:
        raise ServerError(f"the request of conversation {request_id!r} can't be served: {problem}")
    return request


def refuse_all_but_cache(kinds: Iterable[MemoryKind]) -> None:
    """Raises NotAvailableError if a server in the trainer's process is asked to free more than its cache."""
    others = sorted(set(kinds) - {"kv_cache"})
    if others:
        raise NotAvailableError(
            f"a server in the trainer's process can free its kv_cache only, got {', '.join(others)}; weights are the trainer's"
        )


def _prompt_problem(prompt_ids: IntArray, vocab_size: int, max_length: int) -> str | None:
    if len(prompt_ids) == 0:
        return "its prompt is empty"
    # Negative numbers are large without their sign: one pass finds both kinds.
    if prompt_ids.view(np.uint64).max() >= vocab_size:
        wrong = int(prompt_ids[(prompt_ids < 0) | (prompt_ids >= vocab_size)][0])
        return f"its prompt has token id {wrong}; the model's ids are 0 to {vocab_size - 1}"
    if len(prompt_ids) + 1 > max_length:
        return (
            f"its prompt of {len(prompt_ids)} tokens leaves no room for a response within {max_length} tokens; "
            "shorten the prompt or raise sequence_length"
        )
    return None


def _sampling_problem(sampling: SamplingParams) -> str | None:
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1"
    if sampling.temperature < 0:
        return f"temperature is {sampling.temperature}; it must be 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be in (0, 1]"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}; it must be 0 (off) or more"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must be in [0, 1], 0 being off"
    if sampling.repetition_penalty <= 0:
        return f"repetition_penalty is {sampling.repetition_penalty}; it must be above 0"
    if not 0 <= sampling.seed < 2**64:
        return f"seed is {sampling.seed}; it must be in [0, 2**64)"
    return None
