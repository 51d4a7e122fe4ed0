"""`show_metrics`: metrics of environments in the line of a step."""

from __future__ import annotations

from typing import Any

import pytest
from messages import says

from turnwise.config import AgenticConfig, parse_config
from turnwise.errors import ConfigError
from turnwise.examine.envs import check_shown_metrics
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS


def config_of(*names: str, **changes: Any) -> AgenticConfig:
    values = {"pretrain": "x", "custom_envs": {"R": {"env_type": "recall"}}, "show_metrics": list(names)}
    return parse_config(values | changes)[0]


def test_a_metric_that_no_environment_reports_is_refused() -> None:
    check_shown_metrics(config_of("kept", "num_actions"))
    with pytest.raises(ConfigError, match=says("'kpt'", "action_is_valid", "kept")):
        check_shown_metrics(config_of("kpt"))


def test_environments_of_validation_count_as_well() -> None:
    envs = {"R": {"env_type": "recall"}, "L": {"env_type": "frozen_lake"}}
    tags = {"train_env_manager": {"tags": ["L"]}, "val_env_manager": {"tags": ["R"]}}
    check_shown_metrics(config_of("kept", "action_is_effective", custom_envs=envs, **tags))


def test_what_isnt_ours_to_know_may_report_anything() -> None:
    own = {"R": {"env_type": "recall", "agent_name": "mine:Agent"}}
    check_shown_metrics(config_of("anything", custom_envs=own))


def test_each_has_a_column_after_the_trends() -> None:
    columns = AGENTIC_COLUMNS.with_shown(["kept", "bought"])
    titles = [column.title for column in columns.all]
    assert titles[:5] == ["score", "success", "kept", "bought", "val"]
    assert columns.trends[2].read({"env/R/kept": 0.25, "val/env/R/kept": 1.0}) == 0.25
    assert AGENTIC_COLUMNS.with_shown([]) == AGENTIC_COLUMNS
