"""The command line as a user meets it: real processes, exit codes, one message instead of a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from turnwise.cli.main import main
from turnwise.models.presets import PRESETS
from turnwise.rl_tool.parameters import Train

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "qwen2.5-0.5B-agentic"


def turnwise(*arguments, cwd=None, **environment):
    return forked.run(arguments, cwd=cwd, env=os.environ | environment)


@pytest.fixture
def config(job, folder):
    lake = {"env_type": "frozen_lake", "env_config": {"env_instruction": ""}}
    sizes = {
        "rollout_batch_size": 4,
        "val_batch_size": 4,
        "train_env_manager": {"num_env_groups": 1, "group_size": 4},
    }
    return folder / job(lake, seed=1, track_with=["stdout"], max_steps=1, eval_steps=1, **sizes)


def test_train_then_eval_in_new_processes(config, tmp_path):
    trained = turnwise("train", config)
    assert trained.returncode == 0, trained.stderr
    [run] = (tmp_path / "runs" / "job").iterdir()
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "step 1/1" in trained.stdout and str(run) in trained.stdout
    scored = turnwise(
        "eval", config, "--model", run / "checkpoints" / "checkpoint-1", "--json", tmp_path / "score.json"
    )
    assert scored.returncode == 0, scored.stderr
    result = json.loads((tmp_path / "score.json").read_text())
    assert result["overall"]["num_episodes"] == 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert result["overall"]["mean_score"] == pytest.approx(rows[-1]["val/score/mean"], abs=1e-12)
    again = turnwise("train", config)
    assert again.returncode == 0 and len(list((tmp_path / "runs" / "job").iterdir())) == 2, (
        "a second run has its own folder"
    )


def test_a_missing_file_and_a_missing_verb(refused, capsys):
    assert "none.yaml" in refused("train", "none.yaml")
    with pytest.raises(SystemExit) as stopped:
        main(["trian", "x.yaml"])
    assert stopped.value.code == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_the_parameters_of_an_action_are_shown_in_the_terminal(capsys):
    assert main(["tool", "train", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.index("--model_name TEXT") < page.index("--dataset"), "what is needed comes first"
    assert "--lr_scheduler_type constant|linear|cosine  [constant]" in page
    assert {name for name in Train.model_fields if f"--{name} " in page} == set(Train.model_fields) - {
        "custom_reward"
    }
    assert main(["tool", "trian", "-h"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_all_problems_of_a_config_are_listed_on_request(capsys):
    example = str(ROOT / "examples" / "frozen_lake" / "agentic.yaml")
    unknown = [f"no_such_key_{number}=1" for number in range(30)]
    assert main(["config", example, *unknown]) == 2
    shown = capsys.readouterr().err
    assert shown.count("unknown key") == 20 and "--all" in shown
    assert main(["config", example, "--all", *unknown]) == 2
    assert capsys.readouterr().err.count("unknown key") == 30


def test_overrides_may_stand_behind_options(capsys):
    example = str(ROOT / "examples" / "frozen_lake" / "agentic.yaml")
    assert main(["config", example, "--strict", "max_steps=7"]) == 0
    assert "max_steps: 7" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["config", example, "--strikt", "max_steps=7"])
    assert "--strikt" in capsys.readouterr().err


def test_make_model_sets_sizes(tmp_path):
    assert (
        main(
            ["make-model", "--out", str(tmp_path / "model"), "--set", "num_hidden_layers=1", "hidden_size=32"]
        )
        == 0
    )
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (facts["num_hidden_layers"], facts["hidden_size"]) == (1, 32)
    assert main(["make-model", "--out", str(tmp_path / "x"), "--set", "hidden_size"]) == 2


def test_make_model_writes_over_nothing(tmp_path, refused):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    for out in (tmp_path / "precious", tmp_path / "precious" / "thesis.tex"):
        assert "already exists" in refused("make-model", "--out", out)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "..."


def test_the_published_run_scripts_reach_train_from_anywhere(tmp_path):
    script, other = (SCRIPTS / f"run_agentic_pipeline_{name}.sh" for name in ("frozen_lake", "sokoban"))
    assert (
        script.read_text().replace("frozen_lake", "sokoban").replace("FrozenLake", "Sokoban")
        == other.read_text()
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 2
    assert "can't run here" in done.stderr and "vllm" in done.stderr


def test_make_model_names_every_preset(capsys):
    with pytest.raises(SystemExit):
        main(["make-model", "--help"])
    assert ", ".join(PRESETS) in " ".join(capsys.readouterr().out.split())


def test_neither_the_parser_nor_the_config_imports_a_heavy_library():
    code = (
        "import turnwise.cli.main as m, turnwise.config; m.build_parser(); import sys; print(HEAVY & "
        "set(sys.modules))"
    )
    code = f"HEAVY = {{'torch', 'transformers', 'hydra'}}; {code}"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
    )
