"""`save_best` and `early_stopping`: what is kept, when a run ends, and what a resumed run remembers of it."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
from messages import mentions, says
from small_runs import LETTERS, assert_same_weights, built, folder_of_run as run, small_config

from turnwise.assemble.saved import evaluate_model
from turnwise.errors import CheckpointError, ConfigError
from turnwise.examine.examined import examine
from turnwise.lifecycle.by_validation import BEST_FILE, BestValue, ByValidation
from turnwise.models.load import write_weights
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import Metric

OWN = {
    "max_steps": 4,
    "eval_steps": 1,
    "rollout_batch_size": 4,
    "val_batch_size": 2,
    "actor_train": {"training_args": {"learning_rate": 1e-2}},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2},
    "val_env_manager": {"num_env_groups": 2},
    "custom_envs": {"Letters": {**LETTERS, "max_steps": 3}},
}


@pytest.fixture
def make_config(tiny_model, tmp_path):
    return partial(small_config, tiny_model, tmp_path, **OWN)


def test_a_value_is_the_best_in_its_direction_and_by_enough():
    seen = [0.3, 0.35, 0.2, 0.5]
    for mode, delta, expected in (
        ("max", 0.0, [True, True, False, True]),
        ("max", 0.1, [True, False, False, True]),
        ("min", 0.0, [True, False, True, False]),
        ("max", 0.05, [True, False, False, True]),
    ):
        best = BestValue("val/a", mode, delta)
        assert [best.see(step, {"val/a": value}) for step, value in enumerate(seen)] == expected, (
            mode,
            delta,
        )
    again = BestValue("val/a", "max", 0.05)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert (again.value, again.step, again.num_since) == (0.5, 3, 0)


def test_a_value_that_is_no_number_is_never_the_best():
    best, seen = BestValue("val/a", "min"), [math.nan, 1.0, math.nan, 0.5]
    assert [best.see(step, {"val/a": value}) for step, value in enumerate(seen)] == [False, True, False, True]
    assert (best.value, best.step, best.num_since) == (0.5, 3, 0)
    assert not BestValue("val/a", "min", num_since=1).see(1, {}), "a metric that was NaN before is known"


def test_a_run_whose_validations_are_no_numbers_ends_early(tmp_path, make_config, caplog):
    by_validation = ByValidation(make_config(save_best={}, early_stopping={"patience": 2}), tmp_path / "best")
    checkpoints = FakeCheckpoints()
    for step in range(2):
        metrics = [Metric("val/score/mean", math.nan)]
        assert by_validation.see(step, metrics, checkpoints) == metrics
    assert checkpoints.has_ended and mentions(caplog.text, "val/score/mean", "never", "1 of 9")


class FakeCheckpoints:
    num_steps, has_ended = 9, False

    def end_here(self):
        self.has_ended = True


def test_the_best_model_is_kept_and_scores_what_was_measured(make_config):
    config = make_config(save_best={"mode": "min"})
    folder = run(config)
    rows = read_metrics(folder.metrics)
    best = min(rows, key=lambda row: row["val/score/mean"])
    facts = json.loads((folder.best / "best.json").read_text())
    assert facts == {"step": best["step"], "metric": "val/score/mean", "value": best["val/score/mean"]}
    assert [row["val/best"] for row in rows][-1] == best["val/score/mean"]
    again = evaluate_model(examine(config), str(folder.best)).overall
    assert again.mean_score == pytest.approx(best["val/score/mean"], abs=1e-12)
    assert not (folder.best / "trainer_state.pt").exists() and (folder.best / "tokenizer.json").exists()


def test_an_adapter_is_kept_as_one(make_config):
    training = {"model_args": {"lora_rank": 2}, "training_args": {"learning_rate": 1e-2}}
    assert (
        run(make_config(save_best={}, actor_train=training, max_steps=1)).best / "adapter_config.json"
    ).exists()


def test_a_run_ends_early_with_its_checkpoint_and_goes_on_to_nothing_more(make_config, capfd):
    stopping = {"patience": 2, "min_delta": 9.0}
    folder = run(make_config(early_stopping=stopping, save_steps=0))
    assert [row["step"] for row in read_metrics(folder.metrics)] == [0, 1, 2]
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert (
        mentions(said := capfd.readouterr().err, "val/score/mean", "0 steps") and "after 2 of 4 steps" in said
    )
    again = run(make_config(early_stopping=stopping, save_steps=0, resume_from_checkpoint=True))
    assert again.path == folder.path and [row["step"] for row in read_metrics(folder.metrics)] == [0, 1, 2]


def test_a_resumed_run_remembers_the_best(make_config, capfd):
    whole = run(make_config(save_best={}, exp_name="whole"))
    with built(make_config(save_best={})) as pipeline:
        for report in pipeline.steps():
            if report.step == 2:
                break
    resumed = run(make_config(save_best={}, resume_from_checkpoint=True))
    assert resumed.path == pipeline.folder.path
    assert [r["val/best"] for r in read_metrics(resumed.metrics)] == [
        r["val/best"] for r in read_metrics(whole.metrics)
    ]
    assert (resumed.best / "best.json").read_text() == (whole.best / "best.json").read_text()
    assert_same_weights(resumed.best, whole.best)


def test_a_best_model_that_is_not_there_is_forgotten(make_config, tmp_path, caplog):
    watch = ByValidation(make_config(save_best={}, early_stopping={}), tmp_path / "best")
    state = {"value": 0.5, "step": 3, "num_since": 1}
    watch.load_state_dict({"best": state, "stopping": state})
    assert watch.best.value is None and watch.stopping.num_since == 1
    assert "isn't in" in caplog.text


@pytest.mark.parametrize("changed", [{"metric": "val/num_episodes"}, {"mode": "min"}])
def test_the_best_value_of_another_metric_or_mode_is_forgotten(make_config, tmp_path, changed):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text(
        json.dumps({"step": 3, "metric": "val/score/mean", "value": 0.5})
    )
    before, same, other = (
        ByValidation(make_config(save_best=own, early_stopping=own), tmp_path / "best")
        for own in ({}, {}, changed)
    )
    for part in (before.best, before.stopping):
        part.see(3, {"val/score/mean": 0.5})
    state = json.loads(json.dumps(before.state_dict()))
    for resumed, value in ((same, 0.5), (other, None)):
        resumed.load_state_dict(state)
        assert resumed.best.value == resumed.stopping.value == value
    # States of older versions name no metric; that of the best model is in its folder.
    older = {name: {key: part[key] for key in ("value", "step", "num_since")} for name, part in state.items()}
    other.load_state_dict(older)
    assert other.stopping.value == 0.5 and other.best.value == (0.5 if "mode" in changed else None)


def test_an_older_best_model_stays_where_a_new_one_cannot_be_written(make_config, monkeypatch):
    def fail(model, place, weights):
        write_weights(model, place, weights)
        raise OSError(28, "No space left on device")

    with built(make_config(save_best={"metric": "val/num_episodes"}, max_steps=1)) as pipeline:
        steps, folder = pipeline.steps(), pipeline.folder
        next(steps)
        before = {file.name: file.read_bytes() for file in folder.best.iterdir()}
        monkeypatch.setattr("turnwise.training.transformers_model.write_weights", fail)
        with pytest.raises(CheckpointError, match=says("best", "No space left")):
            pipeline.checkpoints.save_model(folder.best, {BEST_FILE: "{}"})
    assert {file.name: file.read_bytes() for file in folder.best.iterdir()} == before
    assert not any(folder.best.parent.glob("best.*"))


def test_a_metric_that_nothing_measures_is_named_with_those_there_are(make_config):
    with pytest.raises(ConfigError, match=says("'val/score/men'", "'val/score/mean'")):
        run(make_config(early_stopping={"metric": "val/score/men"}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"save_best": {}, "eval_steps": 0},
            says("save_best", "metric, mode", "eval_steps is 0"),
        ),
        (
            {"early_stopping": {}, "eval_steps": 0},
            says("early_stopping", "metric, mode, patience, min_delta", "eval_steps is 0"),
        ),
        ({"save_best": {"metric": "score/mean"}}, says("save_best.metric", "'score/mean'")),
        (
            {"save_best": {}, "actor_train": {"model_update_frequency": 2}},
            says("save_best", "eval_steps 1", "older weights"),
        ),
    ],
)
def test_settings_by_which_nothing_can_be_decided_are_refused(make_config, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_config(**changes)
