from __future__ import annotations

import numpy as np
import pytest

from turnwise.algorithms.kl import KLController
from turnwise.algorithms.score_estimator import GRPO
from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
from turnwise.types import samples_of


def advantages(groups):
    return [float(sample.advantages[-1]) for sample in samples_of(groups)]


def test_worked_numbers(make_group):
    groups = [make_group([1, 0, 0, 1]), make_group([3, 3])]
    GRPO(AlgorithmSettings()).credit(groups)
    assert advantages(groups) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024, 0, 0], abs=1e-6)


def test_the_controller_follows_the_settings_unless_it_is_given():
    settings = AlgorithmSettings(init_kl_coef=0.2, target_kl=6.0)
    assert GRPO(settings).controller.target == 6.0
    given = KLController(0.5, 1.0, 10.0)
    assert GRPO(settings, given).controller is given


def test_a_subclass_of_one_s_own_is_made_as_a_config_names_it(make_group):
    """`module:Class` is called with the settings and the controller, and is GRPO as far as it says nothing
    else."""

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
