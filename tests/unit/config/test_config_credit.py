"""Combinations of credit and loss that undo each other are said by `config`."""

from __future__ import annotations

from typing import Any

import pytest
from messages import mentions
from small_configs import notes_of, values_of

from turnwise.config import parse_config
from turnwise.errors import ConfigError


@pytest.mark.parametrize("variant", ["gspo", "gmpo"])
@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce", "agentic_reinforce", "gae"])
def test_a_ratio_of_the_whole_episode_averages_the_credit_of_its_turns(variant: str, estimator: str) -> None:
    (note,) = notes_of(adv_estimator=estimator, pg_variant=variant)
    assert mentions(note, "pg_variant", variant, estimator, "ratio_type: segment")
    with pytest.raises(ConfigError, match="averaged away"):
        parse_config(values_of(adv_estimator=estimator, pg_variant=variant), strict=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"ratio_type": "segment"},
        {"custom_envs.Lake.mode": "step"},
        {"custom_envs.Lake.max_steps": 1},
        {"pg_variant": "ppo"},
        {"adv_estimator": "grpo"},
        {"adv_estimator": "mine:Credit"},
    ],
    ids=str,
)
def test_credit_that_survives_is_not_warned_of(keys: dict[str, Any]) -> None:
    assert notes_of(**({"adv_estimator": "gigpo", "pg_variant": "gspo"} | keys)) == []
