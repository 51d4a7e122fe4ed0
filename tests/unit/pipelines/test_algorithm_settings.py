"""What of a config reaches the mathematics, under which defaults."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields

import pytest
from messages import says
from small_configs import config_of
from small_runs import training

from turnwise.algorithms.kl import KLController
from turnwise.algorithms.normalization import RunningMoments
from turnwise.algorithms.score_estimator import GRPO, ScoreEstimator
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight, RatioBand
from turnwise.config.schema.algorithm import AlgorithmKeys
from turnwise.errors import ConfigError
from turnwise.examine.algorithm import algorithm_settings, make_algorithm
from turnwise.spec import PG_VARIANTS, EstimatorSpec

DEFAULTS = {
    "ppo": ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, "token-mean"),
    "gspo": ({"clip_low": 3e-4, "clip_high": 4e-4}, "seq-mean-token-mean"),
    "gmpo": ({"clip_low": 0.4, "clip_high": 0.4}, "seq-mean-token-mean"),
    "cispo": ({"clip_low": 0.2, "clip_high": 0.2}, "token-mean"),
    "sapo": ({"tau_positive": 1.0, "tau_negative": 1.05}, "token-mean"),
    "vanilla": ({}, "token-mean"),
    "tis": ({"cap": 2.0}, "token-mean"),
    "topr": ({"weight_positive": 1.0, "weight_negative": 1.0}, "token-mean"),
    "kimi15": ({"tau": 0.1}, "token-mean"),
    "clip_cov": (
        {"clip_low": 0.2, "clip_high": 0.2, "fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0},
        "token-mean",
    ),
    "kl_cov": ({"fraction": 2e-4, "coef": 1.0}, "token-mean"),
}


@pytest.mark.parametrize("name", PG_VARIANTS)
def test_defaults_of_the_losses(name):
    settings = algorithm_settings(config_of(pg_variant=name))
    assert (dict(settings.variant_parameters()), settings.aggregation) == DEFAULTS[name]


def test_the_library_has_the_defaults_of_the_config():
    settings = AlgorithmSettings()
    of_library = {f.name: getattr(settings, f.name) for f in fields(settings)}
    for section in (
        "pg_args",
        "reward_normalization",
        "train_infer_correction",
    ):  # have other types there, empty by default
        del of_library[section]
    assert of_library == {name: AlgorithmKeys.model_fields[name].default for name in of_library}


def test_defaults_of_everything_else():
    settings = algorithm_settings(config_of())
    assert (settings.gamma, settings.lambd, settings.step_reward_gamma) == (1.0, 1.0, 0.95)
    assert (settings.episode_reward_weight, settings.step_reward_weight) == (1.0, 1.0)
    assert (settings.kl_penalty, settings.kl_loss_type, settings.kl_loss_coef, settings.kl_horizon) == (
        "k1",
        "k3",
        0.001,
        1e4,
    )
    assert settings.bootstrap_on_truncation and not settings.whiten_rewards and not settings.whiten_advantages
    bounds = (settings.value_clip, settings.reward_clip, settings.advantage_clip, settings.target_kl)
    assert bounds == (None, None, None, None)
    assert algorithm_settings(config_of(adv_estimator="gae", gae_granularity="turn")).lambd == 0.95


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, Correction()),
        (
            {"is_weight": {}, "filters": [{}]},
            Correction(ImportanceWeight("token", 2.0), (RatioBand("token", 0.5, 2.0),)),
        ),
        (
            {"is_weight": {"weight_type": "sequence", "upper_bound": 3}},
            Correction(ImportanceWeight("sequence", 3.0)),
        ),
        ({"is_weight": {"enabled": False}, "filters": [{"enabled": False}]}, Correction()),
        (
            {
                "filters": [
                    {"agg_type": "geometric", "ratio_low": 0.9, "ratio_high": 1.1},
                    {"agg_type": "segment"},
                ]
            },
            Correction(filters=(RatioBand("geometric", 0.9, 1.1), RatioBand("segment", 0.5, 2.0))),
        ),
    ],
    ids=["none", "defaults", "weights", "disabled", "bands"],
)
def test_corrections(asked, expected):
    assert algorithm_settings(config_of(train_infer_correction=asked)).train_infer_correction == expected


class Own(ScoreEstimator):
    spec = EstimatorSpec(needs=frozenset({"greedy_sibling"}), normalization=("tags", "mean_std"))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("tags", "mean_std")),
        ({"method": "mean"}, ("tags", "mean")),
        ({"grouping": "batch"}, ("batch", "mean_std")),
    ],
    ids=str,
)
def test_a_user_s_own_estimator_keeps_its_defaults_and_needs(asked, expected):
    config = config_of(adv_estimator=f"{__name__}:Own", reward_normalization=asked, use_kl_loss=True)
    algorithm = make_algorithm(config, KLController(0.0))
    assert (algorithm.normalizer.grouping, algorithm.normalizer.method) == expected
    assert algorithm.needs == {"greedy_sibling", "ref_logprobs"}


@pytest.mark.parametrize(
    ("keys", "needs"),
    [
        ({}, []),
        ({"use_kl_loss": True}, ["ref_logprobs"]),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1}, ["old_logprobs", "ref_logprobs"]),
        ({"train_infer_correction": {"is_weight": {}}}, ["old_logprobs"]),
        ({"pg_variant": "kl_cov"}, ["old_logprobs"]),
        ({"adv_estimator": "gae"}, ["values"]),
        ({"adv_estimator": "remax"}, ["greedy_sibling"]),
    ],
    ids=str,
)
def test_what_must_have_run_before_credit(keys, needs):
    assert make_algorithm(config_of(**keys), KLController(0.1)).needs == set(needs)


class Plain:
    outputs = frozenset({"logprobs"})

    def __call__(self, outputs, batch):
        raise NotImplementedError


class WithPlain(GRPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.loss = Plain()


class Counting(GRPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.running = RunningMoments()


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("WithPlain", says("WithPlain", "Plain", "divisor", "whole")),
        ("Counting", says("Counting", "running statistics")),
        ("GRPO", None),
    ],
)
def test_an_own_estimator_that_cannot_be_streamed_is_refused_before_anything_is_loaded(name, refused):
    streamed = {"async_generation_ratio": 1, "stream_training": True, "rollout_batch_size": 8}
    config = config_of(adv_estimator=f"{__name__}:{name}", actor_train=training(batch_size=8), **streamed)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        make_algorithm(config, KLController(0.0))
