"""PPO's credit against the definition written out on nested data: turns, contexts, branches, cuts."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import TASK, gae_by_hand, token_rewards, trained
from hypothesis import given, settings, strategies as st

from turnwise.algorithms.kl import KLController
from turnwise.algorithms.losses import PolicyLoss, ValueLoss
from turnwise.algorithms.response_tokens import ResponseTokens, turn_rewards
from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
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
        for name in ("values", "next_values", "old_logprobs", "ref_logprobs"):
            array = rng.normal(size=sample.num_tokens).astype(np.float32)
            setattr(sample, name, np.where(sample.response_mask, array, NAN))
    return trajectory


def make_branched(turns, seed, **fields):
    """Some turns continue an earlier one than the turn before them, so that contexts interleave."""
    rng = np.random.default_rng(seed)
    for index, turn in enumerate(turns[1:], start=1):
        turn.parent = int(rng.integers(index)) if rng.random() < 0.3 else None
    return make_trajectory(turns, seed, **fields)


def credit(trajectories, controller=None, **settings):
    algorithm = PPO(AlgorithmSettings(adv_estimator="gae", **settings), controller)
    metrics = algorithm.credit([Group(TASK, list(trajectories))])
    return reduce_metrics(metrics)


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


@settings(deadline=None)
@given(nested, st.sampled_from(["token", "turn"]), st.booleans(), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.6, 0.0]))
def test_credit_equals_the_definition_on_nested_data(trajectories, granularity, bootstraps, gamma, lambd):
    credit(trajectories, gae_granularity=granularity, bootstrap_on_truncation=bootstraps, gamma=gamma, lambd=lambd)
    for trajectory in trajectories:
        _, of_turns = trained(trajectory)
        for sample in trajectory.samples:
            assert not sample.advantages[~sample.response_mask].any() and not sample.returns[~sample.response_mask].any()
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


def test_worked_numbers():
    trajectory, sample = flat_example()
    credit([trajectory], lambd=0.95)
    assert sample.advantages.tolist() == pytest.approx([0, 2.530575, 2.5585, 0, 1.43, 1.4], abs=1e-6)


def test_worked_numbers_by_turn():
    """δ = [1 + .5 − .2, 2 − .5] = [1.3, 1.5], A_0 = 1.3 + .95·1.5 with λ's default a turn."""
    trajectory, sample = flat_example()
    credit([trajectory], gae_granularity="turn")
    assert sample.advantages.tolist() == pytest.approx([0, 2.725, 2.725, 0, 1.5, 1.5])
    assert sample.returns.tolist() == pytest.approx([0, 2.925, 2.925, 0, 2.0, 2.0])


def test_lambda_is_one_a_token_by_default():
    trajectory, sample = flat_example()
    credit([trajectory])
    assert sample.returns.tolist() == pytest.approx([0, 3, 3, 0, 2, 2])


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


def test_positions_that_a_filter_took_out_are_no_steps():
    trajectory, sample = flat_example()
    sample.response_mask[2] = False
    credit([trajectory])
    assert sample.returns.tolist() == pytest.approx([0, 3, 0, 0, 2, 2])


def test_kl_comes_off_each_token_and_the_clip_follows():
    trajectory, sample = flat_example()
    mask = sample.response_mask
    metrics = credit([trajectory], KLController(0.5, 1.0, 10.0), add_token_level_kl=True, init_kl_coef=0.5, gamma=0.0)
    kl = sample.old_logprobs[mask] - sample.ref_logprobs[mask]
    rewards = np.array([0, 1, 0, 2]) - 0.5 * kl
    np.testing.assert_allclose(sample.returns[mask], rewards, atol=1e-6)
    assert metrics["critic/kl"] == pytest.approx(kl.mean(), abs=1e-6) and metrics["critic/kl_coef"] == 0.5

    kwargs = {"add_token_level_kl": True, "init_kl_coef": 0.5, "gamma": 0.0, "reward_clip": 0.6}
    metrics = credit([trajectory], KLController(0.5, 1.0, 10.0), **kwargs)
    np.testing.assert_allclose(sample.returns[mask], rewards.clip(-0.6, 0.6), atol=1e-6)
    assert metrics["critic/token_reward_clip_frac"] == pytest.approx((np.abs(rewards) > 0.6).mean())


def test_the_adaptive_coefficient_is_steered_by_the_kl_a_token():
    trajectories = [make_trajectory([make_turn(1, 3)], seed) for seed in range(2)]
    controller = KLController(0.2, target=0.1, horizon=100.0)
    metrics = credit(trajectories, controller, add_token_level_kl=True, init_kl_coef=0.2)
    expected = KLController(0.2, 0.1, 100.0)
    expected.update(metrics["critic/kl"], 2)
    assert controller.coef == expected.coef != 0.2


def test_rewards_are_whitened_over_response_tokens_before_returns():
    trajectory, sample = flat_example()
    credit([trajectory], whiten_rewards=True, gamma=0.0)
    rewards = np.array([0.0, 1, 0, 2])
    expected = (rewards - rewards.mean()) / np.sqrt(rewards.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(sample.returns[sample.response_mask], expected, rtol=1e-5)


def test_advantages_are_whitened_and_returns_are_not():
    trajectory, sample = flat_example()
    credit([trajectory], whiten_advantages=True)
    advantages = sample.advantages[sample.response_mask]
    assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std(ddof=1) == pytest.approx(1, abs=1e-5)
    assert sample.returns.tolist() == pytest.approx([0, 3, 3, 0, 2, 2])


def test_normalised_scores_stand_on_the_last_token():
    trajectories = [make_trajectory([make_turn(1, 1, reward), make_turn(1, 2)], seed) for seed, reward in enumerate((3.0, 1.0))]
    normalization = RewardNormalization(grouping="batch", method="mean")
    credit(trajectories, reward_placement="final", reward_normalization=normalization)
    assert [t.samples[0].returns.tolist() for t in trajectories] == [
        pytest.approx([0, 1, 0, 1, 1]),
        pytest.approx([0, -1, 0, -1, -1]),
    ]
    untrained = make_trajectory([make_turn(1, 1, 9.0, is_greedy=True)])
    credit([untrained, *trajectories], reward_placement="final", gamma=0.5)
    assert trajectories[0].samples[0].returns.tolist() == pytest.approx([0, 0.75, 0, 1.5, 3.0])


def test_running_statistics_live_as_long_as_the_run():
    normalization = RewardNormalization(grouping="batch", norm_mean_type="running", norm_std_type="running")
    settings = AlgorithmSettings(adv_estimator="gae", reward_placement="final", reward_normalization=normalization)
    first, second = PPO(settings), PPO(settings)
    first.credit([Group(TASK, [make_trajectory([make_turn(1, 1, 5.0)])])])
    second.running.load_state_dict(first.running.state_dict())
    results = []
    for algorithm in (first, second):
        trajectories = [make_trajectory([make_turn(1, 1, reward)]) for reward in (1.0, 0.0)]
        algorithm.credit([Group(TASK, trajectories)])
        results.append([t.samples[0].returns[1] for t in trajectories])
    seen = np.array([5.0, 1.0, 0.0])
    assert results[0] == results[1] == pytest.approx((seen[1:] - seen.mean()) / seen.std(ddof=1), abs=1e-4)


def test_a_kl_comes_off_scores_before_they_are_normalised():
    normalization = RewardNormalization(method="mean", grouping="batch")
    trajectories = [make_trajectory([make_turn(1, 1, reward), make_turn(1, 2)], seed) for seed, reward in enumerate((3.0, 1.0))]
    sums = []
    for trajectory in trajectories:
        [sample] = trajectory.samples
        sums.append((sample.old_logprobs - sample.ref_logprobs)[sample.response_mask].sum())
    keys = {"add_token_level_kl": True, "init_kl_coef": 0.5, "reward_clip": 0.25}
    credit(trajectories, reward_placement="final", reward_normalization=normalization, **keys)
    difference = (3.0 - 0.5 * sums[0]) - (1.0 - 0.5 * sums[1])
    expected = np.clip(difference / 2, -0.25, 0.25)
    assert [t.samples[0].returns[-1] for t in trajectories] == pytest.approx([expected, -expected], abs=1e-6)
    assert [t.score_kl_penalty for t in trajectories] == pytest.approx([0.5 * float(s) for s in sums], abs=1e-6)


def test_without_values_credit_is_refused():
    trajectory, sample = flat_example()
    sample.values = None
    with pytest.raises(ValueError, match="critic's forward pass"):
        credit([trajectory])


@settings(deadline=None, max_examples=40)
@given(nested, st.sampled_from(["token", "turn"]))
def test_what_lies_outside_the_mask_is_never_read(trajectories, granularity):
    results = []
    for poison in (NAN, np.float32(0.0), np.float32(1e6)):
        for trajectory in trajectories:
            for sample in trajectory.samples:
                for array in (sample.values, sample.next_values, sample.old_logprobs, sample.ref_logprobs):
                    array[~sample.response_mask] = poison
        keys = {"add_token_level_kl": True, "init_kl_coef": 0.1, "whiten_rewards": True, "whiten_advantages": True}
        metrics = credit(trajectories, KLController(0.1, 1.0, 10.0), gae_granularity=granularity, **keys)
        samples = [sample for trajectory in trajectories for sample in trajectory.samples]
        results.append(([(s.advantages.tolist(), s.returns.tolist()) for s in samples], metrics))
    assert results[0] == results[1] == results[2]


def test_metrics_of_credit():
    trajectory, _ = flat_example()
    metrics = credit([trajectory])
    assert metrics["critic/score/mean"] == metrics["critic/rewards/max"] == 3.0
    assert metrics["critic/values/mean"] == pytest.approx(0.4) and metrics["critic/returns/mean"] == 2.5
    assert metrics["critic/advantages/mean"] == pytest.approx(2.1)
    [metric] = explained_variance(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    assert metric.value == pytest.approx(0.75)
    assert explained_variance(np.array([1.0, 2.0]), np.array([1.0, 1.0])) == []


def test_a_batch_without_trained_tokens_is_credited_zeros():
    trajectory = make_trajectory([make_turn(2, 2, 1.0, is_greedy=True)])
    metrics = credit([trajectory], whiten_rewards=True)
    assert trajectory.samples[0].advantages.tolist() == trajectory.samples[0].returns.tolist() == [0.0] * 4
    assert metrics["critic/score/mean"] == 1.0


def test_what_it_needs_and_gives():
    algorithm = PPO(AlgorithmSettings(adv_estimator="gae", use_kl_loss=True))
    assert algorithm.needs == {"values", "ref_logprobs"} and algorithm.running is None
    assert isinstance(algorithm.loss, PolicyLoss) and isinstance(algorithm.value_loss, ValueLoss)
