from __future__ import annotations

import torch

from turnwise.algorithms.masks import masked_mean, masked_var, replace_outside, whiten

NAN = float("nan")


def test_nan_outside_the_mask_changes_neither_values_nor_gradients():
    mask = torch.tensor([True, True, False, True, False])
    clean = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0], requires_grad=True)
    dirty = torch.tensor([1.0, 2.0, NAN, 4.0, float("inf")], requires_grad=True)
    for function in (lambda x: masked_mean(x, mask), lambda x: masked_var(x, mask), lambda x: whiten(x, mask).square().sum()):
        clean.grad = dirty.grad = None
        value, dirty_value = function(clean), function(dirty)
        value.backward()
        dirty_value.backward()
        assert torch.equal(value, dirty_value)
        assert torch.equal(clean.grad, dirty.grad)


def test_statistics_are_those_of_the_masked_tokens_alone():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(13, generator=generator, dtype=torch.float64)
        mask = torch.rand(13, generator=generator) < 0.6
        if mask.sum() < 2:
            continue
        kept = x[mask]
        torch.testing.assert_close(masked_mean(x, mask), kept.mean())
        torch.testing.assert_close(masked_var(x, mask), kept.var(unbiased=True))
        torch.testing.assert_close(whiten(x, mask)[mask], (kept - kept.mean()) / torch.sqrt(kept.var() + 1e-8))


def test_weighted_mean():
    x, mask, weights = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([True, True, False]), torch.tensor([3.0, 1.0, 7.0])
    assert masked_mean(x, mask, weights).item() == 2.0


def test_whitening_one_token_leaves_it_and_no_token_gives_zeros():
    x = torch.tensor([3.0, NAN, NAN])
    assert whiten(x, torch.tensor([True, False, False])).tolist() == [3.0, 0.0, 0.0]
    assert whiten(x, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


def test_an_empty_mask_has_mean_and_variance_zero():
    x, mask = torch.tensor([NAN, 1.0]), torch.zeros(2, dtype=torch.bool)
    assert masked_mean(x, mask).item() == 0.0
    assert masked_var(x, mask).item() == 0.0


def test_replaced_values_are_what_was_asked_for():
    assert replace_outside(torch.tensor([1.0, NAN]), torch.tensor([True, False]), 7.0).tolist() == [1.0, 7.0]
