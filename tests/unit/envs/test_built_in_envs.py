"""What holds for every built-in environment."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from messages import says

from turnwise.envs.registry import make_env
from turnwise.errors import EnvironmentFault
from turnwise.spec import ENVS

CONFIGS: dict[str, dict[str, Any]] = {
    "frozen_lake": {},
    "sokoban": {},
    "gymnasium": {"id": "Taxi-v4"},
    "textarena": {"id": "GuessTheNumber-v0"},
    "reasoning_gym": {"dataset": "chain_sum"},
    "webshop": {"num_products": 100},
    "maze": {"size": 5},
    "recall": {},
    "retry": {},
}
BEHIND_SERVERS = {"openenv"}
"""Environments that aren't here alone; they have tests of their own."""
for_every_env = pytest.mark.parametrize(("env_type", "env_config"), CONFIGS.items(), ids=CONFIGS)


def test_every_environment_is_here() -> None:
    assert set(CONFIGS) | BEHIND_SERVERS == {
        env_type for env_type, entry_point in ENVS.items() if entry_point
    }


@for_every_env
def test_a_step_before_reset_says_so(env_type: str, env_config: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFault, match=r"step came before reset|was used before reset"):
        make_env(env_type, env_config, "train").step("1")


@for_every_env
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"split": "test"}, says("split", "'test'", "'train'", "'val'")),
        ({"format_penalty": 0.1}, says("reward", "actions", "0", "format_penalty")),
    ],
)
def test_arguments_that_all_have_are_checked(
    env_type: str, env_config: dict[str, Any], argument: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        make_env(env_type, {**env_config, **argument}, "train")


@for_every_env
def test_without_a_seed_episodes_follow_one_another_reproducibly(
    env_type: str, env_config: dict[str, Any]
) -> None:
    def starts() -> list[Any]:
        env = make_env(env_type, env_config, "train")
        env.reset(seed=3)
        return [(env.reset()[0], env.state_key()) for _ in range(4)]

    assert starts() == starts() and len(set(starts())) > 1


def test_nothing_imports_what_it_does_not_need() -> None:
    code = "import sys, turnwise.envs.registry; assert 'turnwise.envs.frozen_lake.env' not in sys.modules; "
    code += "import turnwise.envs.frozen_lake.env, turnwise.envs.players, turnwise.envs.sokoban.env; "
    code += "assert not {'gymnasium', 'gym_sokoban'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
