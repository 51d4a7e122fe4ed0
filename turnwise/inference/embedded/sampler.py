"""Draws the next tokens of all rows at once, with counter-based random numbers: the uniform number behind
token t of a request is a hash of (seed, t). It depends neither on other rows, nor on earlier draws, nor on
the device."""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.models.cpu.build import load_kernels
from turnwise.models.cpu.sampler import draw_natively
from turnwise.types import FloatArray, IntArray, KeptIds

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NOT_FINITE = "the model's logits aren't finite: its weights have diverged or its dtype overflows"


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], counters: IntArray) -> FloatArray:
    """Numbers in [0, 1) with 24 random bits, one for each (seed, counter); shapes [B].

    >>> uniforms(np.array([7, 7], np.uint64), np.array([0, 1])).round(4)
    array([0.7215, 0.6497], dtype=float32)
    """
    keys = _splitmix64(seeds + _GOLDEN)
    bits = _splitmix64(keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class Drawn(NamedTuple):
    """The drawn tokens of B rows."""

    token_ids: IntArray  # [B]
    logprobs: FloatArray  # [B] under the distributions that the tokens were drawn from; 0 for greedy rows
    kept_ids: dict[int, KeptIds]
    """For each row with `keeps_ids`, by its index: the ids that its token was drawn from."""


def sample(logits: Tensor, rows: NDArray, ids: IntArray, slots: IntArray) -> Drawn:
    """Draws a token for each row. `logits` [B, V] float32 may be overwritten; `rows` [B] has dtype
    `rows.ROW`; the context of row i is the first `rows["length"][i]` tokens of `ids[slots[i]]`. Sampling
    parameters apply in this order: repetition penalty, temperature, top-k, top-p, min-p. Raises
    FloatingPointError if logits aren't finite."""
    kept_ids: dict[int, KeptIds] = {}
    scores = logits
    if not rows["is_plain"].all():
        scores = _processed(logits, rows, ids, slots, kept_ids)
    numbers = uniforms(rows["seed"], rows["length"] - rows["prompt_length"])
    is_greedy = rows["is_greedy"]
    kernels = load_kernels() if scores.device.type == "cpu" else None
    if kernels:
        drawn = draw_natively(kernels, scores.contiguous(), is_greedy, numbers)
    else:
        drawn = _draw(scores, is_greedy, numbers)
    if drawn is None:
        raise FloatingPointError(_NOT_FINITE)
    token_ids, logprobs = drawn
    return Drawn(token_ids, logprobs, kept_ids)


def _processed(
    logits: Tensor,
    rows: NDArray,
    ids: IntArray,
    slots: IntArray,
    kept_ids: dict[int, KeptIds],
) -> Tensor:
    """The logits of the distributions to draw from. Overwrites `logits`, and adds to `kept_ids` the ids that
    are left in rows with `keeps_ids`."""
    is_penalised = rows["repetition_penalty"] != 1.0
    if is_penalised.any():
        _penalise(logits, np.flatnonzero(is_penalised), rows, ids, slots)
    scores = logits
    if (rows["temperature"] != 1.0).any():
        scores = logits / _column(rows["temperature"], logits.device)
    is_truncated = (rows["top_p"] < 1.0) | (rows["top_k"] > 0) | (rows["min_p"] > 0)
    is_truncated &= ~rows["is_greedy"]
    if is_truncated.any():
        kept_ids |= _truncate(scores, np.flatnonzero(is_truncated), rows)
    return scores


def _column(values: NDArray, device: torch.device) -> Tensor:
    """A field of rows as a tensor [B, 1]. It is copied, since a field of a structured array has gaps."""
    return torch.from_numpy(values.copy()).to(device)[:, None]


def _draw(
    scores: Tensor,
    is_greedy: NDArray[np.bool_],
    numbers: FloatArray,
) -> tuple[IntArray, FloatArray]:
    if is_greedy.all():
        likeliest = _checked(scores).argmax(-1)
        return likeliest.cpu().numpy(), np.zeros(len(scores), np.float32)
    probs = torch.softmax(scores, -1)
    cdf = _running_sums(probs)
    total = _checked(cdf[:, -1:])
    # The first token whose cumulative probability exceeds the threshold has a probability above 0 itself.
    thresholds = torch.from_numpy(numbers).to(scores.device)[:, None] * total
    tokens = torch.searchsorted(cdf, thresholds, right=True)
    logprobs = probs.gather(-1, tokens).log_()[:, 0]
    tokens = tokens[:, 0]
    if is_greedy.any():
        greedy = torch.from_numpy(is_greedy.copy()).to(scores.device)
        tokens = torch.where(greedy, scores.argmax(-1), tokens)
        logprobs = logprobs.masked_fill(greedy, 0.0)
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


def _running_sums(probs: Tensor) -> Tensor:
    """Running sums over the last dimension. On a GPU, torch's order of addition varies, so a deterministic
    run adds integers there: multiples of 2⁻⁴⁰."""
    if not (probs.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return probs.cumsum(-1)
    scaled = (probs.double() * 2**40).long()
    sums = scaled.cumsum(-1).double().mul_(2**-40)
    return sums.to(probs.dtype)


def _checked(values: Tensor) -> Tensor:
    # One sum finds any term that isn't finite. A sum of finite logits overflows only if the model has
    # diverged, too.
    if not math.isfinite(values.sum().item()):
        raise FloatingPointError(_NOT_FINITE)
    return values


def _penalise(
    logits: Tensor,
    row_indices: IntArray,
    rows: NDArray,
    ids: IntArray,
    slots: IntArray,
) -> None:
    """For tokens in the context of the rows `row_indices`, divides positive logits by the penalty and
    multiplies negative ones by it (Keskar et al. 2019, § 4.1)."""
    lengths = rows["length"][row_indices]
    contexts = ids[slots[row_indices], : lengths.max()]
    is_beyond = np.arange(contexts.shape[1]) >= lengths[:, None]
    # Beyond a context its first token stands, which is penalised anyway.
    token_ids = torch.from_numpy(np.where(is_beyond, contexts[:, :1], contexts)).to(logits.device)
    index = torch.from_numpy(row_indices).to(logits.device)
    penalty = _column(rows["repetition_penalty"][row_indices], logits.device)
    row_logits = logits[index]
    plain = row_logits.gather(-1, token_ids)
    penalised = torch.where(plain < 0, plain * penalty, plain / penalty)
    logits[index] = row_logits.scatter(-1, token_ids, penalised)


def _truncate(scores: Tensor, row_indices: IntArray, rows: NDArray) -> dict[int, KeptIds]:
    """Sets scores of the rows `row_indices` to −∞: first outside the top k tokens, then outside the nucleus
    of mass top_p (Holtzman et al. 2020), then for tokens less likely than min_p times the likeliest (Nguyen
    et al. 2024, arXiv:2407.01082). Returns the ids that are left, for rows with `keeps_ids`."""
    index = torch.from_numpy(row_indices).to(scores.device)
    limits = rows[row_indices]
    top_k = _column(limits["top_k"], scores.device)
    top_p = _column(limits["top_p"], scores.device)
    min_p = _column(limits["min_p"], scores.device)
    width = scores.shape[1]
    if limits["top_k"].all():
        width = min(int(limits["top_k"].max()), width)
    ordered, order = scores[index].topk(width)
    rank = torch.arange(width, device=scores.device)
    ordered.masked_fill_((top_k > 0) & (rank >= top_k), -torch.inf)
    probs = torch.softmax(ordered, -1)
    mass_above = _running_sums(probs) - probs
    is_outside = (mass_above >= top_p) & (top_p < 1.0) & (rank > 0)
    ordered.masked_fill_(is_outside, -torch.inf)
    ordered.masked_fill_(probs < min_p * probs[:, :1], -torch.inf)
    truncated = torch.full_like(scores[index], -torch.inf)
    scores[index] = truncated.scatter_(-1, order, ordered)
    if not limits["keeps_ids"].any():
        return {}
    ids = order.int().cpu().numpy()
    is_kept = (ordered > -torch.inf).cpu().numpy()
    return {int(row_indices[row]): ids[row, is_kept[row]] for row in np.flatnonzero(limits["keeps_ids"])}
