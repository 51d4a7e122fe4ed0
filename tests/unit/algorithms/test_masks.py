from __future__ import annotations

import numpy as np
import torch

from turnwise.algorithms.advantages import whiten_all
from turnwise.algorithms.masks import masked_mean, replace_outside

NAN = float("nan")


def test_nan_outside_the_mask_changes_neither_values_nor_gradients():
    mask = torch.tensor([True, True, False, True, False])
    clean = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0], requires_grad=True)
    dirty = torch.tensor([1.0, 2.0, NAN, 4.0, float("inf")], requires_grad=True)
    value, dirty_value = (masked_mean(x, mask, torch.ones(5)) for x in (clean, dirty))
    value.backward()
    dirty_value.backward()
    assert torch.equal(value, dirty_value)
    assert torch.equal(clean.grad, dirty.grad)


def test_whitened_numbers_have_mean_0_and_unbiased_variance_1():
    x = np.random.default_rng(0).normal(3.0, 2.0, 13)
    np.testing.assert_allclose(whiten_all(x), (x - x.mean()) / x.std(ddof=1), rtol=1e-6)


def test_weighted_mean():
    x, mask, weights = (
        torch.tensor([1.0, 5.0, 9.0]),
        torch.tensor([True, True, False]),
        torch.tensor([3.0, 1.0, 7.0]),
    )
    assert masked_mean(x, mask, weights).item() == 2.0


def test_whitening_one_number_leaves_it_and_none_stay_none():
    assert whiten_all(np.array([3.0])).tolist() == [3.0]
    assert whiten_all(np.zeros(0)).tolist() == []


def test_an_empty_mask_has_mean_zero():
    x, mask = torch.tensor([NAN, 1.0]), torch.zeros(2, dtype=torch.bool)
    assert masked_mean(x, mask, torch.ones(2)).item() == 0.0


def test_replaced_values_are_what_was_asked_for():
    assert replace_outside(torch.tensor([1.0, NAN]), torch.tensor([True, False]), 7.0).tolist() == [1.0, 7.0]
