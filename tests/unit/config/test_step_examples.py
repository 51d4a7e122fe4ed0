"""The examples of mode `step` are configs, with the published names."""

from __future__ import annotations

import shutil
from pathlib import Path

from turnwise.agents.prompts import EnvPrompt
from turnwise.config import load_config, unavailable

EXAMPLES = Path(__file__).parents[3] / "examples"
TAGS = ("FrozenLake", "LargerFrozenLake", "SimpleSokoban", "LargerSokoban")


def test_the_environments_step_by_step_may_be_included(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "config", tmp_path / "config")
    picked = "\n".join(f'  {tag}: "${{custom_env.{tag}}}"' for tag in TAGS)
    run = tmp_path / "run" / "main.yaml"
    run.parent.mkdir()
    run.write_text(
        "defaults:\n  - ../config/step_envs@_here_\npretrain: models/none\ndefault_history_length: 3\n"
        f"train_env_manager: {{num_env_groups: 4}}\ncustom_envs:\n{picked}\n"
    )
    config, notes = load_config(run)
    assert notes == [] and unavailable(config) == []
    for env in config.custom_envs.values():
        assert (env.mode, env.history_length) == ("step", 3)
        EnvPrompt(env.agent_system_template, env.agent_template, env.mode, env.history_length)


def test_gigpo_trains_on_trajectories_or_on_turns() -> None:
    whole, notes = load_config(EXAMPLES / "frozen_lake" / "gigpo.yaml")
    steps, more = load_config(EXAMPLES / "frozen_lake" / "gigpo_step.yaml")
    assert notes == more == [] and unavailable(whole) == unavailable(steps) == []
    assert (whole.adv_estimator, steps.adv_estimator) == ("gigpo", "gigpo")
    assert (whole.custom_envs["FrozenLake"].mode, steps.custom_envs["FrozenLake"].mode) == (
        "trajectory",
        "step",
    )
    most = steps.max_samples_per_trajectory
    assert (whole.max_samples_per_trajectory, most) == (1, 10)
    assert (
        steps.optimizer_steps_per_batch() == steps.optimizer_steps_per_batch(samples_per_trajectory=most) == 1
    )
