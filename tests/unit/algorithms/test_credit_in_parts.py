"""What may be trained on group by group gets its credit group by group as well: the same advantages, the same
metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from episodes import build

from turnwise.algorithms.settings import RewardNormalization
from turnwise.config import AgenticConfig, parse_config
from turnwise.spec import ESTIMATORS
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import samples_of

EVERYWHERE = {"add_token_level_kl": True, "init_kl_coef": 0.1, "reward_clip": 0.7, "advantage_clip": 0.6}
NORMALIZED = [{}, {"method": "mean"}, {"method": "asym_clip"}, {"method": "identity"}]


def is_streamed(name: str, changes: dict[str, Any]) -> bool:
    keys: dict[str, Any] = {
        "pretrain": "none",
        "custom_envs": {"Lake": {"env_type": "frozen_lake"}},
        "adv_estimator": name,
    }
    keys |= {
        "async_generation_ratio": 1,
        "actor_train": {"training_args": {"per_device_train_batch_size": 64}},
    }
    config, _ = parse_config(
        keys | {key: changes[key] for key in changes if key != "normalization"}, AgenticConfig
    )
    return config.is_streamed


def credit(name, groups, parts, settings):
    estimator = build(name, **settings)
    metrics = [metric for part in parts for metric in estimator.credit([groups[index] for index in part])]
    return [sample.advantages for sample in samples_of(groups)], reduce_metrics(metrics)


def test_most_estimators_are_streamed():
    others = {"gae", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert {name for name in ESTIMATORS if not is_streamed(name, {})} == others


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if is_streamed(name, {})])
@pytest.mark.parametrize("changes", [{}, EVERYWHERE], ids=["plain", "with all that is of tokens"])
@pytest.mark.parametrize("seed", range(2))
def test_groups_one_by_one_get_what_they_get_together(make_nested, name, changes, seed):
    assert is_streamed(name, changes)
    methods = NORMALIZED if ESTIMATORS[name].normalization != "own" else NORMALIZED[:1]
    for method in methods:
        default = (
            ("traj_group_id", "identity")
            if ESTIMATORS[name].normalization == "own"
            else ESTIMATORS[name].normalization
        )
        asked = RewardNormalization(**{"grouping": "traj_group_id", "method": default[1], **method})
        if ESTIMATORS[name].needs_mean and asked.method == "identity":
            continue
        if (
            ESTIMATORS[name].reward_placement == "turn"
            and not ESTIMATORS[name].has_step_returns
            and asked.method != "identity"
        ):
            continue
        settings = {"reward_normalization": asked, **changes}
        groups = make_nested(seed, smallest=2)
        together, expected = credit(name, groups, [range(len(groups))], settings)
        other = make_nested(seed, smallest=2)
        one_by_one, metrics = credit(
            name, other, [[index] for index in reversed(range(len(other)))], settings
        )
        for got, wanted in zip(one_by_one, together, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        assert metrics.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(
                metrics[key], value, rtol=1e-6, atol=1e-6, err_msg=f"{name} {method} {key}"
            )
