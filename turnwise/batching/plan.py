"""Splits samples into optimiser steps, ranks' shares and micro-batches. Plans are lists of sample indices."""

from collections.abc import Sequence

import numpy as np

from turnwise.types import Denominators, EpisodeParts, Sample, derive_seed

_MAX_IMBALANCE = 1.05


def episodes(samples: Sequence[Sample]) -> list[list[int]]:
    """The indices of the samples of each episode, in the order of their first samples. A sample that isn't a
    part of an episode is alone.

    >>> from turnwise.types import EpisodeParts
    >>> zeros = (np.array([5, 6]), np.zeros(2, np.bool_), np.zeros(2, np.float32), ())
    >>> cut = EpisodeParts()
    >>> episodes([Sample(*zeros, episode=cut), Sample(*zeros), Sample(*zeros, episode=cut)])
    [[0, 2], [1]]
    """
    indices: dict[EpisodeParts | int, list[int]] = {}
    for index, sample in enumerate(samples):
        key = index if sample.episode is None else sample.episode
        indices.setdefault(key, []).append(index)
    return list(indices.values())


def episode_tokens(samples: Sequence[Sample]) -> list[int]:
    """For each sample, the number of tokens of its episode that the loss counts: its own, and those of the
    other parts among `samples`."""
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    totals = counts.copy()
    for indices in episodes(samples):
        total = sum(counts[index] for index in indices)
        for index in indices:
            totals[index] = total
    return totals


def optimizer_steps(
    num_samples: int,
    samples_per_step: int,
    seed: int,
    num_epochs: int = 1,
) -> list[list[list[int]]]:
    """`[epoch][step] → sample indices`: a seeded permutation each epoch, split into steps. An epoch's last
    step may be smaller. If episodes are cut into samples, these are indices of `episodes`.

    >>> [[len(step) for step in epoch] for epoch in optimizer_steps(10, 4, seed=0, num_epochs=2)]
    [[4, 4, 2], [4, 4, 2]]
    """
    if samples_per_step < 1:
        raise ValueError(f"samples_per_step is {samples_per_step}; it must be at least 1")
    plan = []
    starts = range(0, num_samples, samples_per_step)
    for epoch in range(num_epochs):
        generator = np.random.default_rng(derive_seed("optimizer_steps", seed, epoch))
        order = generator.permutation(num_samples).tolist()
        steps = [order[start : start + samples_per_step] for start in starts]
        plan.append(steps)
    return plan


def deal(samples: Sequence[Sample], num_ranks: int) -> list[list[int]]:
    """Returns the sample indices of each rank: every index once, balanced by tokens. Samples are dealt from
    the longest to the shortest, each to the rank with the fewest tokens.

    Samples with equal prompts go to one rank, which computes their prefix once. If the fullest rank would
    thereby get over 5% more tokens than without this rule, all samples are dealt singly.

    >>> from turnwise.types import Sample
    >>> def sample(prompt, length):
    ...     ids = np.array([prompt, *range(length - 1)])
    ...     return Sample(ids, ids != ids[0], np.zeros(length, np.float32), ())
    >>> deal([sample(9, 4), sample(8, 3), sample(9, 4), sample(8, 5)], num_ranks=2)
    [[0, 2], [1, 3]]
    >>> deal([sample(9, 4), sample(9, 4)], num_ranks=2)
    [[0], [1]]
    """
    families: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        prompt_length = int(sample.response_mask.argmax())
        prompt = sample.token_ids[:prompt_length].tobytes()
        families.setdefault(prompt, []).append(index)
    lengths = [sample.num_tokens for sample in samples]
    by_family = _dealt(list(families.values()), lengths, num_ranks)
    singly = _dealt([[index] for index in range(len(samples))], lengths, num_ranks)
    if _most_tokens(by_family, lengths) <= _MAX_IMBALANCE * _most_tokens(singly, lengths):
        return by_family
    return singly


def _most_tokens(ranks: list[list[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[index] for index in rank) for rank in ranks)


def _dealt(units: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    from_largest = sorted(range(len(units)), key=lambda number: (-sizes[number], number))
    for number in from_largest:
        rank = tokens.index(min(tokens))
        ranks[rank] += units[number]
        tokens[rank] += sizes[number]
    return [sorted(rank) for rank in ranks]


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """The indices of the sequences in each micro-batch, ascending. Each sequence is in exactly one
    micro-batch.

    Each sequence, in `order` (default: longest first), goes into the first micro-batch with room. A sequence
    longer than `max_tokens` gets its own micro-batch, since it can't be split. Without limits, all share one
    micro-batch.

    >>> micro_batches([5, 3, 4, 2, 6], max_tokens=10)
    [[2, 4], [0, 1, 3]]
    """
    limits = [limit for limit in (max_tokens, max_sequences) if limit is not None]
    if any(limit < 1 for limit in limits):
        raise ValueError(
            f"micro-batch limits must be at least 1, got max_tokens={max_tokens}, "
            f"max_sequences={max_sequences}"
        )
    bins: list[list[int]] = []
    tokens: list[int] = []
    if order is None:
        order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in order:
        for bin_index, members in enumerate(bins):
            fits_tokens = max_tokens is None or tokens[bin_index] + lengths[index] <= max_tokens
            fits_sequences = max_sequences is None or len(members) < max_sequences
            if fits_tokens and fits_sequences:
                break
        else:
            bin_index = len(bins)
            bins.append([])
            tokens.append(0)
        bins[bin_index].append(index)
        tokens[bin_index] += lengths[index]
    return [sorted(members) for members in bins]


def denominators(samples: Sequence[Sample], max_length: int) -> Denominators:
    """Returns the loss denominators of an optimiser step over `samples`. The parts of an episode count as one
    sequence, each by its share of the episode's tokens. `max_length` is passed through.

    >>> from turnwise.types import TurnSpan
    >>> mask = np.array([False, True, True])
    >>> sample = Sample(np.array([5, 6, 7]), mask, np.zeros(3, np.float32), (TurnSpan(0, 1, 3),), weight=0.5)
    >>> denominators([sample, sample, sample], max_length=8)
    Denominators(num_tokens=3.0, num_sequences=1.5, max_length=8, num_turns=1.5)
    """
    num_tokens = sum(sample.weight * int(sample.loss_mask.sum()) for sample in samples)
    num_sequences = 0.0
    for sample, total in zip(samples, episode_tokens(samples), strict=True):
        if total:
            num_sequences += sample.weight * (int(sample.loss_mask.sum()) / total)
    num_turns = sum(sample.weight * sample.num_counted_turns for sample in samples)
    return Denominators(
        num_tokens=float(num_tokens),
        num_sequences=float(num_sequences),
        max_length=max_length,
        num_turns=float(num_turns),
    )
