"""Packs samples into one Batch, and splits arrays of a Batch by sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.types import Batch, Denominators, Sample, TokenAnnotations, join_kept_ids

_OPTIONAL = (
    "old_logprobs",
    "old_full_logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
    *TokenAnnotations._fields,
)


def pack(
    samples: Sequence[Sample], denominators: Denominators, episode_tokens: Sequence[int] | None = None
) -> Batch:
    """Joins the samples in their order, without padding. `episode_tokens`: for each sample, the number of
    tokens of its episode that the whole step's loss counts; None = no episode has several samples. Raises
    ValueError if there are no samples, an array of `_OPTIONAL` is set in only some of them, or the response
    mask of a sample includes its first token.

    >>> sample = Sample(np.array([5, 6, 7]), np.array([False, False, True]), np.zeros(3, np.float32), ())
    >>> pack([sample, sample], Denominators(2, 2, 8)).position_ids
    array([0, 1, 2, 0, 1, 2])
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    if any(sample.response_mask[0] for sample in samples):
        raise ValueError("the first token of a sample can't be trained on: nothing comes before it")
    lengths = np.array([sample.num_tokens for sample in samples])
    offsets = np.cumsum(lengths) - lengths
    kept_ids, kept_offsets = join_kept_ids(
        (sample.kept_ids, sample.kept_offsets, sample.num_tokens) for sample in samples
    )
    weights = np.array([sample.weight for sample in samples], np.float32)
    of_episodes = None
    if episode_tokens is not None:
        of_episodes = np.repeat(np.array(episode_tokens, np.float32), lengths)
    return Batch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        position_ids=np.arange(lengths.sum()) - np.repeat(offsets, lengths),
        sequence_id=np.repeat(np.arange(len(samples)), lengths),
        turn_id=np.concatenate([_turn_id(sample) for sample in samples]),
        response_mask=np.concatenate([sample.response_mask for sample in samples]),
        weights=np.repeat(weights, lengths),
        episode_tokens=of_episodes,
        lengths=tuple(lengths.tolist()),
        denominators=denominators,
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
        temperatures=_temperatures(samples),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs for sample in samples]),
        media=tuple(medium for sample in samples for medium in sample.media),
        media_positions=_media_positions(samples, offsets),
        **{name: _concatenated(samples, name) for name in _OPTIONAL},
    )


def blank(sample: Sample) -> Sample:
    """A sample of weight 0 for an empty micro-batch: two untrained tokens, with the optional arrays that
    `sample` has."""
    arrays: dict[str, Any] = {}
    for name in _OPTIONAL:
        array = getattr(sample, name)
        if array is not None:
            arrays[name] = np.zeros_like(array, shape=2)
    return Sample(
        token_ids=sample.token_ids[:1].repeat(2),
        response_mask=np.zeros(2, np.bool_),
        rollout_logprobs=np.zeros(2, np.float32),
        turn_spans=(),
        weight=0.0,
        **arrays,
    )


def unpack(array: np.ndarray[Any, Any], lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Splits an array [N] of a batch by sample. The parts are copies, so that none of them keeps the whole
    array alive. Raises ValueError if `lengths` don't add up to N.

    >>> [part.tolist() for part in unpack(np.arange(5), (3, 2))]
    [[0, 1, 2], [3, 4]]
    """
    if len(array) != sum(lengths):
        raise ValueError(
            f"an array of {len(array)} can't be unpacked into samples of {sum(lengths)} tokens together"
        )
    ends = np.cumsum(lengths)
    parts = np.split(array, ends[:-1])
    return [part.copy() for part in parts]


def _turn_id(sample: Sample) -> np.ndarray[Any, Any]:
    turn_id = np.full(sample.num_tokens, -1, np.int64)
    for index, span in enumerate(sample.turn_spans):
        turn_id[span.start : span.stop] = index
    turn_id[~sample.response_mask] = -1
    return turn_id


def _media_positions(samples: Sequence[Sample], offsets: np.ndarray[Any, Any]) -> tuple[int, ...]:
    positions: list[int] = []
    for sample, offset in zip(samples, offsets.tolist(), strict=True):
        positions += [offset + position for position in sample.media_positions]
    return tuple(positions)


def _temperatures(samples: Sequence[Sample]) -> np.ndarray[Any, Any] | None:
    if all(sample.temperatures is None for sample in samples):
        return None
    arrays = []
    for sample in samples:
        if sample.temperatures is None:
            arrays.append(np.zeros(sample.num_tokens, np.float32))
        else:
            arrays.append(sample.temperatures)
    return np.concatenate(arrays)


def _concatenated(samples: Sequence[Sample], name: str) -> np.ndarray[Any, Any] | None:
    arrays = [getattr(sample, name) for sample in samples]
    missing = sum(array is None for array in arrays)
    if missing == len(arrays):
        return None
    if missing:
        raise ValueError(f"{missing} of {len(arrays)} samples have no {name}")
    return np.concatenate(arrays)
