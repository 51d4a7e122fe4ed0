from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from toy_model import toy_samples

from turnwise.batching.plan import denominators, micro_batches, optimizer_steps

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.none() | st.integers(1, 120), st.none() | st.integers(1, 6))
def test_every_sequence_is_in_exactly_one_micro_batch_within_the_limits(
    lengths: list[int], max_tokens: int | None, max_sequences: int | None
) -> None:
    plan = micro_batches(lengths, max_tokens, max_sequences)
    assert sorted(index for members in plan for index in members) == list(range(len(lengths)))
    for members in plan:
        assert members == sorted(members) and members
        assert max_sequences is None or len(members) <= max_sequences
        assert max_tokens is None or len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens


@given(LENGTHS, st.integers(50, 120))
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int], max_tokens: int) -> None:
    sizes = sorted(sum(lengths[i] for i in members) for members in micro_batches(lengths, max_tokens))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > max_tokens


def test_without_a_limit_all_go_together_and_limits_are_checked() -> None:
    assert micro_batches([3, 1, 2]) == [[0, 1, 2]]
    assert micro_batches([]) == []
    assert micro_batches([3, 1, 2, 3], max_tokens=5, order=[2, 0, 3, 1]) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="max_tokens=0"):
        micro_batches([1], max_tokens=0)


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 3))
def test_each_epoch_is_a_permutation_cut_into_steps(
    num_samples: int, samples_per_step: int, num_epochs: int
) -> None:
    plan = optimizer_steps(num_samples, samples_per_step, seed=1, num_epochs=num_epochs)
    assert len(plan) == num_epochs
    for epoch in plan:
        assert sorted(index for step in epoch for index in step) == list(range(num_samples))
        assert all(len(step) == samples_per_step for step in epoch[:-1])


def test_epochs_and_seeds_differ_and_a_seed_repeats() -> None:
    first, second = optimizer_steps(50, 50, seed=1, num_epochs=2)
    assert first != second
    assert optimizer_steps(50, 50, seed=1) == [first] != optimizer_steps(50, 50, seed=2)
    with pytest.raises(ValueError, match="samples_per_step"):
        optimizer_steps(5, 0, seed=1)


def test_denominators_leave_out_what_is_not_trained() -> None:
    first, second, third = (
        replace(sample, weight=w) for sample, w in zip(toy_samples(3), (0.5, 0.0, 1.0), strict=True)
    )
    third = replace(third, response_mask=third.response_mask & False)
    assert denominators([first, second, third], 64) == (0.5 * first.num_trained, 0.5, 64, 0.5 * 2)
