from __future__ import annotations

import pytest
import torch

from turnwise.algorithms.kl import KL_ESTIMATORS, kl_divergence

LOGPROBS, REFERENCE = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.2, -0.5, 0.0]),
        ("abs", [0.2, 0.5, 0.0]),
        ("k2", [0.02, 0.125, 0.0]),
        ("k3", [0.018731, 0.148721, 0.0]),
    ],
)
def test_worked_numbers(name, expected):
    torch.testing.assert_close(
        kl_divergence(LOGPROBS, REFERENCE, name), torch.tensor(expected), atol=1e-6, rtol=0
    )


def test_k3_stays_finite_where_the_policies_are_far_apart():
    lp = torch.tensor([-1.0, -1000.0], requires_grad=True)
    kl = kl_divergence(lp, torch.tensor([-1000.0, -1.0]), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(lp.grad).all()


def expected_over_actions(estimator, logits, base):
    """E_p[estimator] with p's probabilities held fixed as weights: what a loss over sampled tokens averages
    to."""
    logp, logq = torch.log_softmax(logits, 0), torch.log_softmax(base, 0)
    return (logp.exp().detach() * KL_ESTIMATORS[estimator](logp - logq)).sum()


def test_expected_values_are_the_kl_and_k1_has_no_gradient_as_a_loss():
    base = torch.tensor([0.3, -0.7, 0.1, 0.9], dtype=torch.float64)
    logits = torch.tensor([0.5, 0.2, -0.4, 0.0], dtype=torch.float64, requires_grad=True)
    logp, logq = torch.log_softmax(logits, 0), torch.log_softmax(base, 0)
    exact = (logp.exp() * (logp - logq)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits)

    for estimator in ("k1", "k3"):
        torch.testing.assert_close(expected_over_actions(estimator, logits, base), exact)
    (k1_gradient,) = torch.autograd.grad(expected_over_actions("k1", logits, base), logits)
    torch.testing.assert_close(k1_gradient, torch.zeros(4, dtype=torch.float64))
    (k2_gradient,) = torch.autograd.grad(expected_over_actions("k2", logits, base), logits)
    torch.testing.assert_close(k2_gradient, exact_gradient)
