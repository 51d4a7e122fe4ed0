from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from turnwise.algorithms.response_tokens import discounted_sums, gae

FINITE = st.floats(-10, 10, width=32)


@st.composite
def trajectories(draw):
    """`(rewards, values, lengths, last_values)`, trajectories without a step among them."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    rewards, values = (draw(arrays(np.float64, sum(lengths), elements=FINITE)) for _ in range(2))
    return rewards, values, np.array(lengths), draw(arrays(np.float64, len(lengths), elements=FINITE))


def by_definition(rewards, values, last_value, gamma, lambd):
    """A_t = Σ_l (γλ)^l δ_{t+l}, the sum written out."""
    following = [*values[1:], last_value][: len(values)]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lambd) ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))]


@settings(deadline=None, max_examples=60)
@given(trajectories(), st.floats(0, 1), st.floats(0, 1))
def test_each_trajectory_equals_the_definition_written_out(data, gamma, lambd):
    rewards, values, lengths, last_values = data
    advantages, returns = gae(rewards, values, lengths, gamma, lambd, last_values)
    starts = np.cumsum(lengths) - lengths
    expected = [
        by_definition(rewards[s : s + n], values[s : s + n], last, gamma, lambd)
        for s, n, last in zip(starts, lengths, last_values, strict=True)
    ]
    np.testing.assert_allclose(advantages, [a for part in expected for a in part], atol=1e-6)
    np.testing.assert_allclose(returns, advantages + values, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(trajectories(), st.floats(0, 1))
def test_discounted_sums_are_sums(data, discount):
    x, _, lengths, _ = data
    expected = []
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        part = x[start : start + length]
        expected += [sum(discount ** (k - t) * part[k] for k in range(t, length)) for t in range(length)]
    np.testing.assert_allclose(discounted_sums(x, lengths, discount), expected, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(trajectories(), st.floats(0, 1))
def test_with_lambda_one_returns_are_monte_carlo_and_with_zero_one_step_targets(data, gamma):
    rewards, values, lengths, _ = data
    _, monte_carlo = gae(rewards, values, lengths, gamma, 1.0)
    np.testing.assert_allclose(monte_carlo, discounted_sums(rewards, lengths, gamma), atol=1e-6)
    _, one_step = gae(rewards, values, lengths, gamma, 0.0)
    ends = set((np.cumsum(lengths) - 1).tolist())
    expected = [r + (0.0 if t in ends else gamma * values[t + 1]) for t, r in enumerate(rewards)]
    np.testing.assert_allclose(one_step, expected, atol=1e-6)


def test_a_perfect_critic_leaves_no_advantage():
    rewards, lengths = np.array([0.0, 1.0, 0.5, 2.0]), np.array([3, 1])
    values = discounted_sums(rewards, lengths, 0.9)
    advantages, _ = gae(rewards, values, lengths, 0.9, 0.7)
    assert advantages == pytest.approx(np.zeros(4))


def test_a_cut_goes_on_with_the_value_after_it_and_an_end_does_not():
    rewards, values = np.array([0.0, 0.0]), np.array([1.0, 1.0])
    advantages, _ = gae(rewards, values, np.array([1, 1]), 0.5, 1.0, last_values=np.array([0.0, 4.0]))
    assert advantages.tolist() == [-1.0, 1.0]
