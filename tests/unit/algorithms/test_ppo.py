"""PPO's credit against the definition written out on nested data: turns, contexts, branches, cuts."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import TASK, gae_by_hand, token_rewards, trained
from hypothesis import given, settings, strategies as st

from turnwise.algorithms.response_tokens import ResponseTokens, turn_rewards
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.token_estimator import PPO, explained_variance
from turnwise.batching.samples import build_samples
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Group, Trajectory, Turn

NAN = np.float32("nan")


def make_turn(num_prompt, num_response, reward=0.0, **fields):
    ids = np.arange(num_response)
    return Turn(np.arange(num_prompt), ids, np.full(num_response, -0.5, np.float32), reward=reward, **fields)


def make_trajectory(turns, seed=0, **fields):
    """With its samples; what a forward pass would fill is random on trained tokens and NaN elsewhere."""
    trajectory = Trajectory(TASK, 0, turns=turns, **fields)
    trajectory.samples = build_samples(trajectory)
    rng = np.random.default_rng(seed)
    for sample in trajectory.samples:
        for name in ("values", "next_values"):
            array = rng.normal(size=sample.num_tokens).astype(np.float32)
            setattr(sample, name, np.where(sample.response_mask, array, NAN))
    return trajectory


def make_branched(turns, seed, **fields):
    """Some turns continue an earlier one than the turn before them, so that contexts interleave."""
    rng = np.random.default_rng(seed)
    for index, turn in enumerate(turns[1:], start=1):
        turn.parent = int(rng.integers(index)) if rng.random() < 0.3 else None
    return make_trajectory(turns, seed, **fields)


def credit(trajectories, **settings):
    return reduce_metrics(
        PPO(AlgorithmSettings(adv_estimator="gae", **settings)).credit([Group(TASK, trajectories)])
    )


turns = st.lists(
    st.builds(
        make_turn,
        st.integers(1, 3),
        st.integers(0, 3),
        st.floats(-2, 2, width=32),
        is_greedy=st.integers(0, 4).map(lambda n: n == 0),
        starts_context=st.integers(0, 3).map(lambda n: n == 0),
    ),
    min_size=1,
    max_size=5,
)
nested = st.lists(
    st.builds(
        make_branched,
        turns,
        st.integers(0, 99),
        status=st.just("truncated"),
        limit=st.sampled_from(["max_steps", "sequence_length", "environment", "time"]),
        outcome_rewards=st.sampled_from([{}, {"judge": 0.5}]),
    ),
    min_size=1,
    max_size=4,
)


def test_contexts_are_one_row_in_the_order_of_their_turns():
    """Turns 0 and 2 are one context, and turns 0, 1 and 3 another, which only reads turn 0."""
    turns = [make_turn(2, 1), make_turn(1, 2), make_turn(1, 1, 1.0, parent=0), make_turn(1, 1, parent=1)]
    trajectory = make_trajectory(turns)
    assert len(trajectory.samples) == 2
    tokens = ResponseTokens.of([trajectory])
    assert tokens.position.tolist() == [2, 9, 10, 4, 12] and tokens.turn.tolist() == [0, 1, 1, 2, 3]
    assert turn_rewards(tokens).tolist() == [0, 0, 0, 1, 0]
    parts = tokens.scatter(np.array([1.0, 2, 3, 4, 5]))
    assert [part.tolist() for part in parts] == [[0, 0, 1, 0, 4], [0, 0, 0, 0, 2, 3, 0, 5]]


@settings(deadline=None)
@given(
    nested,
    st.sampled_from(["token", "turn"]),
    st.booleans(),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.6, 0.0]),
)
def test_credit_equals_the_definition_on_nested_data(trajectories, granularity, bootstraps, gamma, lambd):
    credit(
        trajectories,
        gae_granularity=granularity,
        bootstrap_on_truncation=bootstraps,
        gamma=gamma,
        lambd=lambd,
    )
    for trajectory in trajectories:
        _, of_turns = trained(trajectory)
        for sample in trajectory.samples:
            assert (
                not sample.advantages[~sample.response_mask].any()
                and not sample.returns[~sample.response_mask].any()
            )
        if not of_turns:
            continue
        rewards = token_rewards(trajectory, "turn", lambda *token: 0.0)
        assert sum(map(sum, rewards)) == pytest.approx(trajectory.score, abs=1e-5)
        last_sample, last = of_turns[-1][-1]
        is_cut = bootstraps and trajectory.limit in ("environment", "time")
        last_value = float(last_sample.next_values[last]) if is_cut else 0.0
        if granularity == "token":
            of_turns = [[token] for tokens in of_turns for token in tokens]
            rewards = [[reward] for of_turn in rewards for reward in of_turn]
        steps = [(tokens, sum(of_step)) for tokens, of_step in zip(of_turns, rewards, strict=True)]
        values = [float(tokens[0][0].values[tokens[0][1]]) for tokens, _ in steps]
        expected = gae_by_hand([reward for _, reward in steps], values, last_value, gamma, lambd)
        for (tokens, _), advantage, value in zip(steps, expected, values, strict=True):
            for sample, position in tokens:
                assert sample.advantages[position] == pytest.approx(advantage, abs=1e-4)
                assert sample.returns[position] == pytest.approx(advantage + value, abs=1e-4)


def flat_example():
    """r = [0,0,1,0,0,2], mask [0,1,1,0,1,1], V = [.1 … .6]: the two turns of the design's worked example."""
    trajectory = make_trajectory([make_turn(1, 2, 1.0), make_turn(1, 2, 2.0)])
    [sample] = trajectory.samples
    sample.values = np.where(sample.response_mask, np.arange(1, 7, dtype=np.float32) / 10, NAN)
    return trajectory, sample


def test_worked_numbers_by_turn():
    """δ = [1 + .5 − .2, 2 − .5] = [1.3, 1.5], A_0 = 1.3 + .95·1.5 with λ's default a turn."""
    trajectory, sample = flat_example()
    credit([trajectory], gae_granularity="turn")
    assert sample.advantages.tolist() == pytest.approx([0, 2.725, 2.725, 0, 1.5, 1.5])
    assert sample.returns.tolist() == pytest.approx([0, 2.925, 2.925, 0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("fields", "goes_on"),
    [
        ({"status": "finished"}, False),
        ({"status": "truncated", "limit": "max_steps"}, False),
        ({"status": "truncated", "limit": "sequence_length"}, False),
        ({"status": "truncated", "limit": "environment"}, True),
        ({"status": "truncated", "limit": "time"}, True),
    ],
)
def test_truncated_is_not_terminated(fields, goes_on):
    trajectory = make_trajectory([make_turn(1, 1, 0.0)], **fields)
    [sample] = trajectory.samples
    sample.values[1], sample.next_values[1] = 0.5, 4.0
    credit([trajectory], gamma=0.5)
    assert sample.returns[1] == pytest.approx(2.0 if goes_on else 0.0)
    credit([trajectory], gamma=0.5, bootstrap_on_truncation=False)
    assert sample.returns[1] == 0.0


def test_advantages_are_whitened_and_returns_are_not():
    trajectory, sample = flat_example()
    credit([trajectory], whiten_advantages=True)
    advantages = sample.advantages[sample.response_mask]
    assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std(ddof=1) == pytest.approx(
        1, abs=1e-5
    )
    assert sample.returns.tolist() == pytest.approx([0, 3, 3, 0, 2, 2])


def test_without_values_credit_is_refused():
    trajectory, sample = flat_example()
    sample.values = None
    with pytest.raises(ValueError, match="critic's forward pass"):
        credit([trajectory])


def test_metrics_of_credit():
    trajectory, _ = flat_example()
    metrics = credit([trajectory])
    assert metrics["critic/score/mean"] == metrics["critic/rewards/max"] == 3.0
    assert metrics["critic/values/mean"] == pytest.approx(0.4) and metrics["critic/returns/mean"] == 2.5
    assert metrics["critic/advantages/mean"] == pytest.approx(2.1)
    [metric] = explained_variance(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    assert metric.value == pytest.approx(0.75)
    assert explained_variance(np.array([1.0, 2.0]), np.array([1.0, 1.0])) == []
