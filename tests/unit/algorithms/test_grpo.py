from __future__ import annotations

import importlib
import math

import numpy as np
import pytest

from turnwise.algorithms.kl import KLController
from turnwise.algorithms.score_estimator import GRPO
from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
from turnwise.errors import ConfigError
from turnwise.spec import ESTIMATORS
from turnwise.types import samples_of


def advantages(groups):
    """One number per trajectory, having checked that all its trained tokens carry it and no other token does."""
    found = []
    for group in groups:
        for trajectory in group.trajectories:
            values = np.concatenate([s.advantages[s.response_mask] for s in trajectory.samples])
            assert len(set(values.tolist())) == 1
            assert all((s.advantages[~s.response_mask] == 0).all() for s in trajectory.samples)
            found.append(float(values[0]))
    return found


def by_hand(scores):
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((s - mean) ** 2 for s in scores) / max(len(scores) - 1, 1))
    return [(s - mean) / (std + 1e-6) if len(scores) > 1 and std > 1e-6 else 0.0 for s in scores]


def test_worked_numbers(make_group):
    groups = [make_group([1, 0, 0, 1]), make_group([3, 3])]
    GRPO(AlgorithmSettings()).credit(groups)
    assert advantages(groups) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024, 0, 0], abs=1e-6)


def test_random_nested_data_equals_the_definition(make_group):
    rng = np.random.default_rng(0)
    for _ in range(10):
        groups, expected = [], []
        for _ in range(rng.integers(1, 5)):
            scores = rng.choice([0.0, 0.5, 1.0], size=rng.integers(1, 6)).tolist()
            masks = [[[1, *rng.integers(0, 2, size=rng.integers(1, 9))] for _ in range(rng.integers(1, 3))] for _ in scores]
            groups.append(make_group(scores, masks))
            expected += by_hand(scores)
        GRPO(AlgorithmSettings()).credit(groups)
        assert advantages(groups) == pytest.approx(expected, abs=1e-6)


def test_long_episodes_do_not_weigh_more_in_the_statistics(make_group):
    short = [make_group([1, 0, 0], masks=[[[1]], [[1]], [[1]]])]
    long = [make_group([1, 0, 0], masks=[[[1] * 50], [[1]], [[1]]])]
    algorithm = GRPO(AlgorithmSettings())
    algorithm.credit(short)
    algorithm.credit(long)
    assert advantages(short) == advantages(long)


def test_two_groups_of_one_task_id_are_not_merged(make_group):
    groups = [make_group([1, 0], task_id="same"), make_group([5, 5], task_id="same")]
    GRPO(AlgorithmSettings(reward_normalization=RewardNormalization(method="mean"))).credit(groups)
    assert advantages(groups) == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("method", ["mean", "mean_std"])
def test_a_group_of_one_and_equal_siblings_teach_nothing(method, make_group):
    groups = [make_group([7.0]), make_group([0.1 + 0.2, 0.3])]
    GRPO(AlgorithmSettings(reward_normalization=RewardNormalization(method=method))).credit(groups)
    assert advantages(groups) == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_sub_agents_of_one_run_weigh_as_one(make_group):
    split = [make_group([1.0, 1.0, 0.0, 0.0], weights=[0.5, 0.5, 1.0, 1.0])]
    whole = [make_group([1.0, 0.0, 0.0])]
    algorithm = GRPO(AlgorithmSettings())
    algorithm.credit(split)
    algorithm.credit(whole)
    expected = advantages(whole)
    assert advantages(split) == pytest.approx([expected[0], *expected], abs=1e-6)


def test_credit_twice_gives_the_same(make_group):
    groups = [make_group([1, 0, 0])]
    algorithm = GRPO(AlgorithmSettings(whiten_advantages=True))
    algorithm.credit(groups)
    first = [s.advantages.copy() for s in samples_of(groups)]
    algorithm.credit(groups)
    for a, sample in zip(first, samples_of(groups), strict=True):
        np.testing.assert_array_equal(a, sample.advantages)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, set()),
        ({"use_kl_loss": True}, {"ref_logprobs"}),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1}, {"ref_logprobs", "old_logprobs"}),
    ],
)
def test_it_needs_what_its_settings_use(settings, needs):
    assert GRPO(AlgorithmSettings(**settings)).needs == needs


def test_the_controller_follows_the_settings_unless_it_is_given():
    settings = AlgorithmSettings(init_kl_coef=0.2, target_kl=6.0)
    assert GRPO(settings).controller.target == 6.0
    given = KLController(0.5, 1.0, 10.0)
    assert GRPO(settings, given).controller is given


@pytest.mark.parametrize("normalization", [RewardNormalization(method="identity"), RewardNormalization(norm_mean_type="none")])
def test_grpo_without_a_mean_is_refused_with_both_choices(normalization):
    with pytest.raises(ConfigError, match=r"grpo.*reward_normalization.*mean_std"):
        GRPO(AlgorithmSettings(reward_normalization=normalization))


def test_a_subclass_of_one_s_own_is_made_as_a_config_names_it(make_group):
    """`module:Class` is called with the settings and the controller, and is GRPO as far as it says nothing else."""

    class Shifted(GRPO):
        def credit(self, groups):
            metrics = super().credit(groups)
            for sample in samples_of(groups):
                sample.advantages = sample.advantages + sample.response_mask.astype(np.float32)
            return metrics

    settings = AlgorithmSettings(adv_estimator="my.module:Shifted", add_token_level_kl=True, init_kl_coef=0.1)
    assert settings.needs == {"old_logprobs", "ref_logprobs"}
    own = Shifted(AlgorithmSettings(adv_estimator="my.module:Shifted"), KLController(0.5, 1.0, 10.0))
    assert (own.needs, own.value_loss) == (frozenset(), None)
    groups = [make_group([1, 0, 0, 1])]
    own.credit(groups)
    assert advantages(groups) == pytest.approx([1.866024, 0.133976, 0.133976, 1.866024], abs=1e-6)


def test_running_statistics_are_its_own_and_continue_from_a_checkpoint(make_group):
    assert GRPO(AlgorithmSettings()).running is None
    settings = AlgorithmSettings(reward_normalization=RewardNormalization(norm_std_type="running"))
    first, second = GRPO(settings), GRPO(settings)
    first.credit([make_group([3, -4])])
    second.running.load_state_dict(first.running.state_dict())
    results = []
    for algorithm in (first, second):
        groups = [make_group([1, 0, 0, 1])]
        algorithm.credit(groups)
        results.append(advantages(groups))
    std = np.std([3, -4, 1, 0, 0, 1], ddof=1)
    assert results[0] == results[1] == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / std, abs=1e-5)


def test_spec_names_this_class():
    module, _, name = ESTIMATORS["grpo"].entry.partition(":")
    assert vars(importlib.import_module(module))[name] is GRPO
