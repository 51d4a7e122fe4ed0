"""The page on security names what runs code, by the names of the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_configs import config_of

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
SECTIONS = config_of().model_dump()


@pytest.mark.parametrize(
    "key",
    [
        "model_args.trust_remote_code",
        "model_args.allow_pickle",
        "custom_envs.<tag>.encode_special_tokens",
        "env_type",
        "agent_name",
        "adv_estimator",
        "pg_variant",
        "group_filter",
    ],
)
def test_a_key_that_runs_code_or_guards_is_named_and_is_a_key(key):
    assert key in PAGE
    assert key.rpartition(".")[2] in re.findall(r"'(\w+)': ", str(SECTIONS))


def test_what_it_says_is_off_is_off():
    arguments = SECTIONS["actor_train"]["model_args"]
    assert not arguments["trust_remote_code"] and not arguments["allow_pickle"]
