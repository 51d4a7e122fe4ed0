"""`turnwise train --replay` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from messages import says

from turnwise.cli.main import main
from turnwise.tracking.jsonl import read_metrics


@pytest.fixture
def job(job):
    """The config of a run that plays ahead."""
    manager = {"num_env_groups": 2, "group_size": 2}
    ahead = {"async_generation_ratio": 1, "rollout_batch_size": 4, "train_env_manager": manager}
    return job({"env_type": "odd_envs:HesitantEnv"}, save_steps=0, **ahead)


def test_a_run_is_repeated_with_its_config(job, capsys):
    name = "it's a job (2), again"
    assert main(["train", job, "exp_name=" + repr(name)]) == 0
    [first] = Path("runs", name).iterdir()
    assert main(["train", "--replay", str(first), "track_with=[stdout]"]) == 0
    [second] = Path("runs", f"{name}-replay").iterdir()
    assert [first] == list(Path("runs", name).iterdir()), "it is no run that the experiment goes on from"
    sampled = [
        [
            [turn["response_ids"] for turn in json.loads(line)["turns"]]
            for line in (run / "rollouts.jsonl").open()
        ]
        for run in (first, second)
    ]
    assert sampled[0] == sampled[1]


CUT = "actor_infer.generating_args={top_p: 0.9, top_k: 20}"


@pytest.mark.extra
def test_a_run_under_top_p_and_top_k_is_repeated_with_the_ids_that_were_kept(job, capsys):
    assert main(["train", job, CUT, "train_infer_correction={is_weight: {}}", "use_kl_loss=true"]) == 0
    [first] = Path("runs/job").iterdir()
    assert main(["train", "--replay", str(first)]) == 0
    [second] = Path("runs/job-replay").iterdir()
    turns, metrics = [], []
    for run in (first, second):
        rows = [json.loads(line) for line in (run / "rollouts.jsonl").open()]
        names = ("response_ids", "logprobs", "kept_ids")
        turns.append([[turn[name] for name in names] for row in rows for turn in row["turns"]])
        measured = read_metrics(run / "metrics.jsonl")
        metrics.append([{name: row[name] for name in row if name.startswith("actor/")} for row in measured])
    assert turns[0] == turns[1] and metrics[0] == metrics[1]
    kept = [ids for _, _, of_turn in turns[0] for ids in of_turn]
    assert kept and all(1 <= len(ids) <= 20 for ids in kept) and max(map(len, kept)) > 1
    ratios = [
        row["actor/train_infer_ratio_token_mean"]
        for row in metrics[0]
        if "actor/train_infer_ratio_token_mean" in row
    ]
    assert ratios and ratios == pytest.approx([1.0] * len(ratios), abs=0.05), (
        "over the whole vocabulary it is below 0.9"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--replay", "nowhere"], says("folder of a run")),
        (["train", "job.yaml", "--replay", "nowhere"], says("job.yaml", "another")),
        (
            ["train", "--replay", "nowhere", "actor_train.training_args.learning_rate=0.1"],
            says("actor_train", "change"),
        ),
        (["train", "--replay", "nowhere", "seed=7"], "remove seed=7"),
        (["train", "--replay", "nowhere", "--from-rollouts", "x.jsonl"], says("remove", "one of them")),
    ],
)
def test_bad_input_is_answered_in_a_sentence(job, refused, arguments, message):
    assert re.search(message, refused(*arguments))
