"""`turnwise eval`: modes, samples, several models, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from turnwise.cli.main import main
from turnwise.models.load import load_model, load_tokenizer, save_model
from turnwise.tracking.traces_file import read_traces

PLAIN = {"agent_system_template": "", "agent_template": "{observation}", "action_pattern": None}


@pytest.fixture
def config(tiny_model, folder):
    letters = {"env_type": "toy_envs:LettersEnv", "max_tokens_per_step": 4}
    values = {
        "pretrain": str(tiny_model),
        "val_batch_size": 8,
        "sequence_length": 128,
        "val_env_manager": {"num_env_groups": 4},
        "custom_envs": {
            "Letters": letters | PLAIN,
            "Short": letters | PLAIN | {"env_config": {"num_turns": 1}},
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    return "job.yaml"


def result_of(*arguments):
    assert main(["eval", *arguments, "--json", "score.json"]) == 0
    return json.loads(Path("score.json").read_text())


def test_both_modes_are_played_and_that_of_validation_comes_first(config, capsys):
    result = result_of(config)
    assert [r["mode"] for r in result["results"]] == ["sampled", "greedy"]
    assert {name: result[name] for name in result["results"][0]} == result["results"][0]
    assert result["overall"]["num_episodes"] == 8 and set(result["by_tag"]) == {"Letters", "Short"}
    lines = capsys.readouterr().out.splitlines()
    rows = [
        line.partition("  0.")[0].strip()
        for line in lines
        if line.startswith(("tiny,", "  Letters", "  Short"))
    ]
    assert rows == ["tiny, sampled", "Letters", "Short", "tiny, greedy", "Letters", "Short"]
    assert result_of(config, "val_env_manager.generating_args.do_sample=false")["mode"] == "greedy"


def test_an_evaluation_repeats_itself_and_samples_of_a_task_come_in_order(config):
    once, again = (result_of(config, "--sampled", "--samples", "4") for _ in range(2))
    assert once == again
    assert once != result_of(config, "--sampled", "--samples", "4", "seed=7")
    assert list(once["overall"]["pass_at"]) == ["1", "2", "4"] and once["overall"]["num_tasks"] == 8
    assert once["overall"]["pass_at"]["1"] == pytest.approx(once["overall"]["success"])
    greedy = result_of(config, "--greedy", "--episodes", "5")
    assert [r["mode"] for r in greedy["results"]] == ["greedy"] and greedy["overall"]["num_episodes"] == 5


def test_greedy_episodes_are_greedy(config, tmp_path):
    """A sampled episode at a temperature near 0 does the same."""
    greedy = result_of(config, "--greedy")
    cold = result_of(config, "--sampled", "val_env_manager.generating_args.temperature=0.0001")
    assert greedy["overall"] == cold["overall"]
    warm = result_of(config, "--sampled", "val_env_manager.generating_args.temperature=0")
    assert warm["mode"] == "sampled" and warm["overall"] != greedy["overall"]


def test_several_models_stand_below_each_other(config, tiny_model, tmp_path, capsys):
    other = tmp_path / "other"
    model = load_model(tiny_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    save_model(model, load_tokenizer(tiny_model), other)
    result = result_of(
        config, "--sampled", "--model", str(tiny_model), "--model", str(other), "val_batch_size=6"
    )
    assert [Path(r["model"]).name for r in result["results"]] == ["tiny", "other"]
    first, second = result["results"]
    assert first["overall"]["num_episodes"] == 6 and first["overall"] != second["overall"]
    assert (
        result_of(config, "--sampled", "--model", str(other), "val_batch_size=6")["overall"]
        == second["overall"]
    )
    assert "other, sampled" in capsys.readouterr().out


def test_sigterm_ends_it_like_ctrl_c_and_what_is_finished_is_reported(job, counting_env, capsys):
    job(counting_env("if Mine.made == 7:", "    signal.raise_signal(signal.SIGTERM)"), val_batch_size=4)
    assert main(["eval", "job.yaml", "--json", "score.json"]) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("interrupted\n") and "Traceback" not in captured.err
    assert "tiny, sampled" in captured.out and "tiny, greedy" not in captured.out
    assert [r["mode"] for r in json.loads(Path("score.json").read_text())["results"]] == ["sampled"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "2", "--greedy"], "all the same"),
        (["--json", "nowhere/score.json"], "there is no folder nowhere"),
        (["--json", "."], "is a folder"),
        (["--model", "nowhere"], "no such model folder"),
        (["custom_envs.Letters.agent_name=react_agent"], "react_agent"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(config, refused, arguments, message):
    assert message in refused("eval", config, *arguments)


def test_episodes_are_written_for_the_viewer(config, capsys):
    assert main(["eval", config, "--samples", "2", "--rollouts", "episodes.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("episodes.jsonl").read_text().splitlines()]
    assert [sum(line["step"] == step for line in lines) for step in (0, 1)] == [16, 8], "sampled, then greedy"
    assert (
        main(["view", "episodes.jsonl", "--out", "pages"]) == 0 and Path("pages/data/0-file-2.js").is_file()
    )
    assert main(["eval", config, "--rollouts", "episodes.jsonl"]) == 2
    assert "episodes.jsonl" in capsys.readouterr().err


def test_traces_lie_beside_the_episodes(config, tiny_model, capsys):
    models = ["--model", str(tiny_model), "--model", str(tiny_model)]
    arguments = [config, "--samples", "2", *models, "trace.backend=jsonl"]
    assert main(["eval", *arguments, "--rollouts", "episodes.jsonl"]) == 0
    captured = capsys.readouterr()
    assert "episodes-traces.jsonl" in captured.out and "trace.backend" not in captured.err
    lost: list[str] = []
    traces = list(read_traces(Path("episodes-traces.jsonl"), lost))
    assert not lost and all(trace.tags["validate"] for trace in traces)
    steps = [trace.tags["step"] for trace in traces]
    assert [steps.count(step) for step in range(4)] == [16, 8, 16, 8], "sampled, greedy, for each model"


def test_without_a_file_of_episodes_there_are_no_traces(config, capsys):
    assert main(["eval", config, "--sampled", "trace.backend=jsonl"]) == 0
    assert "--rollouts" in capsys.readouterr().err and not list(Path().glob("*traces*"))
