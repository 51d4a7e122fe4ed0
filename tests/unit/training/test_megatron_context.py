"""Context-parallel ranks: each computes its tokens of every sample, and together they are one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from context_model import ContextModel, context_batch
from toy_model import toy_batches, toy_samples, with_kept_ids

from turnwise.models.forward import kept_ids_of
from turnwise.training.megatron.context import TokenShare
from turnwise.types import Batch


def shares_of(batch: Batch, num_ranks: int, divisor: int = 1) -> list[TokenShare]:
    return [TokenShare.of(batch, num_ranks, rank, divisor) for rank in range(num_ranks)]


@pytest.mark.parametrize("divisor", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_token_is_on_one_rank_and_all_have_as_many(num_ranks: int, divisor: int) -> None:
    batch = context_batch()
    shares = shares_of(batch, num_ranks, divisor)
    assert len({len(share.token_ids) for share in shares}) == 1
    assert len(shares[0].token_ids) % divisor == 0
    rows = torch.cat([share.rows for share in shares])
    assert sorted(rows[rows >= 0].tolist()) == list(range(batch.num_tokens))
    for share in shares:
        is_real = share.rows >= 0
        assert torch.equal(share.token_ids[is_real], batch.token_ids[share.rows[is_real]])
        assert torch.equal(share.position_ids[is_real], batch.position_ids[share.rows[is_real]])
        assert sum(share.lengths) == num_ranks * len(share.token_ids)


def test_ranks_have_pieces_from_both_ends() -> None:
    """The order that TransformerEngine's kernels expect of two ranks, sample by sample."""
    batch = context_batch()
    batch.lengths = (8, 5)
    batch.token_ids = torch.arange(13)
    first, second = shares_of(batch, 2)
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 1, 6, 7]
    assert second.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    assert first.rows.tolist() == [0, 1, 6, 7, 8, 9, -1, -1]
    assert second.rows.tolist() == [2, 3, 4, 5, 10, 11, 12, -1]
    assert first.lengths == [8, 8]


@pytest.mark.parametrize("divisor", [1, 4])
def test_one_rank_has_all_tokens_in_their_order(divisor: int) -> None:
    batch = context_batch()
    share = TokenShare.of(batch, divisor=divisor)
    assert torch.equal(share.token_ids[: batch.num_tokens], batch.token_ids)
    assert len(share.token_ids) % divisor == 0 and sum(share.lengths) == len(share.token_ids)
    tokens = batch.response_mask.nonzero().squeeze(-1)
    chosen, places = share.held(tokens, batch.num_tokens)
    assert chosen.all() and torch.equal(places, tokens)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_log_probs_and_gradients_of_all_ranks_are_those_of_one(num_ranks: int) -> None:
    """No process: each rank is handed the sum of what all would send."""
    batch = context_batch()
    expected, gradients = ContextModel().computed(TokenShare.of(batch), None)
    shares = shares_of(batch, num_ranks)
    sent = torch.stack([ContextModel().logprobs(share, batch).detach() for share in shares]).sum(0)
    total = [torch.zeros_like(gradient) for gradient in gradients]
    for share in shares:
        logprobs, of_rank = ContextModel().computed(share, lambda values: values.copy_(sent))
        np.testing.assert_allclose(logprobs, expected, rtol=1e-6, atol=1e-6)
        for number, gradient in enumerate(of_rank):
            total[number] += gradient
    for summed, gradient in zip(total, gradients, strict=True):
        np.testing.assert_allclose(summed, gradient, rtol=1e-5, atol=1e-6)


def test_kept_ids_are_those_of_a_ranks_tokens() -> None:
    [batch] = toy_batches(with_kept_ids(toy_samples(4), 3))
    batch = batch.map(torch.as_tensor)
    trained = batch.response_mask.nonzero().squeeze(-1)
    every = kept_ids_of(batch, trained)
    for share in shares_of(batch, 2):
        chosen, _ = share.held(trained - 1, batch.num_tokens)
        some = kept_ids_of(batch, trained[chosen])
        assert torch.equal(some.counts, every.counts[chosen])
        assert torch.equal(some.ids, every.ids[chosen.repeat_interleave(every.counts)])
