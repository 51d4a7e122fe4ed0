from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from turnwise.algorithms.response_tokens import gae

FINITE = st.floats(-10, 10, width=32)


@st.composite
def trajectories(draw):
    """`(rewards, values, lengths, last_values)`, trajectories without a step among them."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    rewards, values = (draw(arrays(np.float64, sum(lengths), elements=FINITE)) for _ in range(2))
    return (
        rewards,
        values,
        np.array(lengths),
        draw(st.none() | arrays(np.float64, len(lengths), elements=FINITE)),
    )


def by_definition(rewards, values, last_value, gamma, lambd):
    """A_t = Σ_l (γλ)^l δ_{t+l}, the sum written out."""
    following = [*values[1:], last_value][: len(values)]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * lambd) ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))
    ]


@settings(deadline=None, max_examples=60)
@given(trajectories(), st.floats(0, 1), st.floats(0, 1))
def test_each_trajectory_equals_the_definition_written_out(data, gamma, lambd):
    rewards, values, lengths, last_values = data
    advantages, returns = gae(rewards, values, lengths, gamma, lambd, last_values)
    lasts = np.zeros(len(lengths)) if last_values is None else last_values
    expected = [
        by_definition(rewards[end - n : end], values[end - n : end], last, gamma, lambd)
        for end, n, last in zip(np.cumsum(lengths), lengths, lasts, strict=True)
    ]
    np.testing.assert_allclose(advantages, [a for part in expected for a in part], atol=1e-6)
    np.testing.assert_allclose(returns, advantages + values, atol=1e-9)
