"""Samples are dealt to ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from turnwise.batching.pack import blank, pack
from turnwise.batching.plan import deal, denominators
from turnwise.pipelines.model_role import BatchPlan
from turnwise.types import Sample

LENGTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 60)), min_size=1, max_size=40)


def make(prompt: int, length: int) -> Sample:
    ids = np.array([prompt, *range(length - 1)])
    return Sample(
        ids, np.arange(length) > 0, np.zeros(length, np.float32), (), advantages=np.ones(length, np.float32)
    )


@given(LENGTHS, st.integers(1, 5))
def test_every_sample_is_dealt_once_and_no_rank_is_far_above_the_mean(shapes, num_ranks):
    samples = [make(*shape) for shape in shapes]
    dealt = deal(samples, num_ranks)
    assert sorted(index for rank in dealt for index in rank) == list(range(len(samples)))
    tokens = [sum(samples[index].num_tokens for index in rank) for rank in dealt]
    # Dealing the longest first is at most the mean and one sample; siblings together may cost 5% of that.
    assert max(tokens) <= 1.05 * (sum(tokens) / num_ranks + max(sample.num_tokens for sample in samples))


def test_siblings_stay_together_where_that_costs_less_than_five_percent():
    assert deal([make(prompt, 10) for prompt in (1, 1, 2, 2, 1, 1, 2, 2)], 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    uneven = [make(1, 10) for _ in range(6)] + [make(2, 10) for _ in range(2)]
    assert sorted(len(rank) for rank in deal(uneven, 2)) == [4, 4]


@given(LENGTHS, st.integers(1, 4), st.one_of(st.none(), st.integers(60, 120)))
def test_ranks_have_the_same_number_of_micro_batches(shapes, num_ranks, max_tokens):
    samples = [make(*shape) for shape in shapes]
    plan = BatchPlan(samples_per_step=4, max_length=64, seed=0, max_sequences=3)
    cuts = plan.cut(samples, max_tokens, num_ranks)
    assert len(cuts) % num_ranks == 0
    assert sorted(index for cut in cuts for index in cut) == list(range(len(samples)))


def test_a_blank_sample_counts_nothing_and_fits_into_a_batch_with_others():
    sample = make(1, 5)
    batch = pack([sample, blank(sample)], denominators([sample], 8))
    assert batch.lengths == (5, 2) and batch.weights.tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert denominators([blank(sample)], 8).num_tokens == 0


def test_ranks_differ_by_at_most_five_percent_on_log_normal_lengths():
    rng = np.random.default_rng(0)
    for num_ranks in (2, 4, 8):
        lengths = np.clip(rng.lognormal(5, 1, 256), 8, 4096).astype(int)
        samples = [make(index // 8, int(length)) for index, length in enumerate(lengths)]
        tokens = [sum(samples[index].num_tokens for index in rank) for rank in deal(samples, num_ranks)]
        assert max(tokens) <= 1.05 * sum(tokens) / num_ranks
