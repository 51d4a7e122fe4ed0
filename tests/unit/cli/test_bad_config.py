"""A wrong config: every command says what is wrong on one screen, exits with 2, and has written nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import mentions

from turnwise.cli.main import main

SCREEN = 24
AGENTIC = """\
pretrain: models/none
output_dir: {runs}
sequence_length: 256
rollout_batch_size: 8
train_env_manager: {{num_env_groups: 2, group_size: 4}}
actor_train: {{training_args: {{learning_rate: 0.001}}}}
custom_envs:
  Lake: {{env_type: frozen_lake, max_steps: 2}}
"""
SFT = "pretrain: models/none\noutput_dir: {runs}\ntrain_files: demos.jsonl\nsequence_length: 256\n"


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs a command on a config with overrides and lines behind it; returns what it printed as its error."""

    def run(verb: str, *overrides: str, text: str = AGENTIC, more: str = "") -> str:
        path = tmp_path / "main.yaml"
        path.write_text(text.format(runs=tmp_path / "runs") + more)
        assert main([verb, str(path), *overrides]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert len(captured.err.splitlines()) <= SCREEN and "Traceback" not in captured.err
        assert not (tmp_path / "runs").exists()
        return captured.err

    return run


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("rollout_batch_siz=8", "Did you mean 'rollout_batch_size'?"),
        ("actor_train.training_args.learning_rat=1", "Did you mean 'learning_rate'?"),
        ("custom_envs.Lake.max_step=3", "Did you mean 'max_steps'?"),
        ("train_env_manger.group_size=4", "Did you mean 'train_env_manager'?"),
        ("learning_rate=1", "Did you mean 'actor_train.training_args.learning_rate'?"),
        ("nonsense=1", "nonsense: unknown key"),
    ],
)
def test_an_unknown_key_names_the_nearest(refused, override: str, hint: str) -> None:
    error = refused("train", override)
    assert hint in error and f"override '{override}'" in error


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("max_steps=many", "max_steps"),
        ("max_steps=1.5", "max_steps"),
        ("max_steps=true", "max_steps"),
        ("max_steps=-1", "max_steps"),
        ("seed=[1]", "seed"),
        ("use_kl_loss=maybe", "use_kl_loss"),
        ("actor_train.training_args.learning_rate=fast", "actor_train.training_args.learning_rate"),
        ("actor_train=fast", "actor_train"),
        ("custom_envs=3", "custom_envs"),
        ("++custom_envs.Lake=lake", "custom_envs.Lake"),
        ("custom_envs.Lake.tools=3", "custom_envs.Lake.tools"),
        ("loss_agg_mode=tokenmean", "loss_agg_mode"),
        ("custom_envs.Lake.action_pattern='('", "custom_envs.Lake.action_pattern"),
    ],
)
def test_a_wrong_type_names_the_key_and_what_was_got(refused, override: str, key: str) -> None:
    error = refused("config", override)
    [line] = [line for line in error.splitlines() if f"{key}: " in line]
    assert override.partition("=")[2].strip("'[]").lower() in line.lower()


@pytest.mark.parametrize("verb", ["config", "train", "eval"])
def test_everything_that_is_wrong_is_said_at_once_with_file_and_line(
    refused, tmp_path: Path, verb: str
) -> None:
    error = refused(verb, "max_stepz=3", more="seed: lucky\nppo_epoch: 2\n")
    path = tmp_path / "main.yaml"
    assert "3 problems" in error
    assert (
        f"{path}:9: seed: " in error
        and f"{path}:10: ppo_epoch: unknown key. Did you mean 'ppo_epochs'?" in error
    )
    assert mentions(error, "override 'max_stepz=3'", "'max_steps'")


def test_very_many_problems_are_still_one_screen(refused) -> None:
    error = refused("config", more="".join(f"mistake_{number}: 1\n" for number in range(100)))
    assert "100 problems" in error and "… and 80 more" in error


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("num_epoch=2", "Did you mean 'num_epochs'?"),
        ("train_files=3", "train_files"),
        ("rollout_batch_size=8", "rollout_batch_size: unknown key"),
        ("training_args.per_device_train_batch_size=0", "greater than or equal to 1"),
        ("eval_steps=5", "there are no val_files"),
    ],
)
def test_supervised_fine_tuning_refuses_in_the_same_way(refused, override: str, hint: str) -> None:
    assert hint in refused("sft", override, text=SFT)
    assert hint in refused("config", override, text=SFT)


def test_a_config_of_the_other_kind_is_named(refused) -> None:
    assert "train_files: unknown key" in refused("train", text=SFT)
