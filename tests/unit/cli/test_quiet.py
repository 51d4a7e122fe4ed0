"""`--quiet` leaves warnings, errors and the places of the results."""

from __future__ import annotations

import json

import pytest
import yaml

from turnwise.cli.main import main


@pytest.fixture
def run(tiny_model, tmp_path, capsys, monkeypatch):
    """Runs a verb on a config; returns the lines of output and error."""
    monkeypatch.chdir(tmp_path)

    def call(verb, values, *arguments):
        (tmp_path / "toy.yaml").write_text(yaml.safe_dump({"pretrain": str(tiny_model), "sequence_length": 384, **values}))
        assert main([verb, "toy.yaml", *arguments]) == 0
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err.splitlines()

    return call


def test_a_quiet_training_says_where_its_results_are(run):
    values = {
        "max_steps": 1,
        "rollout_batch_size": 2,
        "eval_steps": 1,
        "val_batch_size": 2,
        "train_env_manager": {"num_env_groups": 1, "group_size": 2},
        "custom_envs": {"Toy": {"env_type": "toy_envs:LettersEnv", "max_steps": 1, "max_tokens_per_step": 4}},
    }
    out, err = run("train", values, "--quiet")
    assert [line.partition(":")[0] for line in out] == ["model", "learning curve"]
    assert [line for line in err if "takes no `split`" in line], "warnings are printed"
    loud, _ = run("train", values)
    assert [line for line in loud if line.startswith("step 1/1")]


def test_a_quiet_fine_tuning_says_where_its_model_is(run, tmp_path):
    row = {"messages": [{"role": "user", "content": "P _ G"}, {"role": "assistant", "content": "Right"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    out, _ = run("sft", {"train_files": "rows.jsonl"}, "--quiet")
    assert [line.partition(":")[0] for line in out] == ["model", "learning curve"]
