"""Training from a file of rollouts: the same step as with episodes, its end, going on, and files that don't
fit."""

from __future__ import annotations

import json
import re

import pytest
from messages import mentions, says
from small_runs import LETTERS, assert_same_weights, folder_of_run as run, small_config, training

from turnwise.assemble.saved import collect_rollouts
from turnwise.errors import CheckpointError, DataError
from turnwise.examine.examined import examine
from turnwise.pipelines.collect import Collection
from turnwise.rollout.journal import read_journal
from turnwise.tracking.jsonl import read_metrics

NOT_TRAINED = ("time/", "system/tps", "actor/staleness")


def make_config(tiny_model, folder, **changes):
    own = {
        "max_steps": 3,
        "actor_train": training(1e-2, lr_scheduler_type="linear"),
        "custom_envs": {"Letters": {name: value for name, value in LETTERS.items() if name != "max_steps"}},
    }
    return small_config(tiny_model, folder, **own | changes)


def checkpoint(folder, step):
    return folder.path / "checkpoints" / f"checkpoint-{step}"


def measured(folder, step):
    return {k: v for k, v in read_metrics(folder.metrics)[step].items() if not k.startswith(NOT_TRAINED)}


@pytest.fixture(scope="module")
def played(tiny_model, tmp_path_factory):
    """A run of three steps."""
    return run(make_config(tiny_model, tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def again(played, tiny_model, tmp_path_factory):
    """A run from its rollouts."""
    return run(make_config(tiny_model, tmp_path_factory.mktemp("again")), rollouts=played.rollouts)


@pytest.fixture
def altered(played, tmp_path):
    """A copy of the run's rollouts with each record changed."""

    def alter(change):
        path = tmp_path / "altered.jsonl"
        records = [json.loads(line) for line in played.rollouts.read_text().splitlines()]
        for record in records:
            change(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return alter


def test_training_from_the_rollouts_of_a_run_is_that_run_bit_by_bit(played, again, tiny_model, tmp_path):
    for step in range(3):
        assert_same_weights(checkpoint(played, step + 1), checkpoint(again, step + 1))
        assert measured(played, step) == measured(again, step)
        assert "actor/staleness_max" in read_metrics(played.metrics)[step]
        assert "actor/staleness_max" not in read_metrics(again.metrics)[step], (
            "versions of another run are no age in this one"
        )
    first, second = (read_journal(folder.rollouts) for folder in (played, again))
    assert [(s, t.task, t.sibling, t.score) for s, t in first] == [
        (s, t.task, t.sibling, t.score) for s, t in second
    ]
    other = run(make_config(tiny_model, tmp_path, adv_estimator="gae"), rollouts=played.rollouts)
    with pytest.raises(AssertionError):  # the algorithm is this config's
        assert_same_weights(checkpoint(other, 1), checkpoint(again, 1))


def test_rollouts_without_a_trainer_train_like_those_of_a_run(played, tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path)
    collection = Collection(tmp_path / "rollouts.jsonl")
    collect_rollouts(examine(config), collection)
    assert_same_weights(checkpoint(played, 1), checkpoint(run(config, rollouts=collection.file), 1))


def test_greedy_siblings_are_in_the_file(played, tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, adv_estimator="remax", max_steps=1)
    first = run(config)
    rows = [json.loads(line) for line in first.rollouts.read_text().splitlines()]
    assert [(row["sibling"], row["is_baseline"]) for row in rows[:5]] == [(i, i == 4) for i in range(5)]
    assert all(
        "advantage" not in turn and turn["is_greedy"]
        for row in rows
        if row["is_baseline"]
        for turn in row["turns"]
    )
    assert_same_weights(checkpoint(first, 1), checkpoint(run(config, rollouts=first.rollouts), 1))
    with pytest.raises(DataError, match=says("train/Letters/0", "greedy sibling", "remax")):
        run(config, rollouts=played.rollouts)


def test_training_ends_with_the_file_and_keeps_its_schedule(played, tiny_model, tmp_path, caplog):
    lines = played.rollouts.read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:20])[:-30])
    folder = run(make_config(tiny_model, tmp_path / "runs", eval_steps=10), rollouts=tmp_path / "cut.jsonl")
    rows = read_metrics(folder.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2] and "val/score/mean" in rows[2], "the end is validated"
    assert rows[1]["actor/lr"] == measured(played, 1)["actor/lr"]
    assert [f.name for f in sorted((folder.path / "checkpoints").iterdir())] == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    assert mentions(caplog.text, "1 of 20 lines") and "train/Letters/4 (3 of 4 trajectories)" in caplog.text
    assert mentions(caplog.text, "2 batches", "3 steps")


def test_it_goes_on_where_it_stopped(played, again, tiny_model, tmp_path):
    going_on = make_config(tiny_model, tmp_path, resume_from_checkpoint=str(checkpoint(again, 2)))
    assert_same_weights(checkpoint(again, 3), checkpoint(run(going_on, rollouts=played.rollouts), 3))
    with pytest.raises(CheckpointError, match="--from-rollouts"):
        run(going_on)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(played.rollouts.read_text().splitlines(keepends=True)[8:]))
    with pytest.raises(CheckpointError, match=says("other.jsonl", "trained")):
        run(going_on, rollouts=other)


def test_what_its_run_rejected_is_left_out(altered, tiny_model, tmp_path, caplog):
    def change(record):
        if record["group"] % 2:
            record["rejected"] = "filtered"

    folder = run(make_config(tiny_model, tmp_path), rollouts=altered(change))
    groups = {trajectory.task.id for _, trajectory in read_journal(folder.rollouts)}
    assert groups == {"train/Letters/0", "train/Letters/2"}
    assert mentions(caplog.text, "6 complete", "3 were rejected")


def test_a_filter_of_this_config_is_applied(altered, tiny_model, tmp_path, caplog):
    def change(record):
        if record["group"] == 1:
            for turn in record["turns"]:
                turn["reward"] = 0.0
            record["score"] = 0.0

    folder = run(
        make_config(tiny_model, tmp_path, group_filter="non_zero_variance"), rollouts=altered(change)
    )
    assert "train/Letters/1" not in {trajectory.task.id for _, trajectory in read_journal(folder.rollouts)}
    assert re.search(r"[1-5] by group_filter", caplog.text)


def put(value, *keys):
    """Sets what stands under these keys of a record. A function makes the value of what stood there."""

    def change(record):
        *outer, last = keys
        for key in outer:
            record = record[key]
        record[last] = value(record[last]) if callable(value) else value

    return change


SHORT = {
    "Letters": LETTERS
    | {"max_tokens_per_step": 1, "agent_template": "{turn_idx}", "agent_system_template": ""}
}


@pytest.mark.parametrize(
    ("changes", "alter", "said"),
    [
        (
            {"train_env_manager": {"num_env_groups": 2, "group_size": 2}},
            None,
            "have 4 siblings .*train_env_manager.group_size=4",
        ),
        ({"rollout_batch_size": 32}, None, says("6 groups", "rollout_batch_size 32", "8")),
        (
            {"sequence_length": 16, "custom_envs": SHORT},
            None,
            says("context", "sequence_length 16"),
        ),
        (
            {"adv_estimator": "gae", "max_steps": 9, "critic_warmup": 3},
            None,
            says("3 batches", "critic_warmup 3"),
        ),
        ({}, put("failed", "status"), says("0 groups")),
        ({}, put("val", "task", "split"), says("train/Letters/0", "validation")),
        ({}, put(10**6, "turns", 0, "prompt_ids", 0), says("token 1000000", "model")),
        ({}, put("{}?".format, "turns", 0, "text"), says("tokens", "another tokenizer")),
        ({}, put("Maze", "task", "tag"), says("'Maze'", "custom_envs")),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_reason(
    played, altered, tiny_model, tmp_path, changes, alter, said
):
    rollouts = altered(alter) if alter else played.rollouts
    with pytest.raises(DataError, match=said):
        run(make_config(tiny_model, tmp_path, **changes), rollouts=rollouts)
    assert not list(tmp_path.glob("letters/*")), "a start that failed leaves no folder"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(str, "score"), says("score", "valid number")),
        (put(lambda score: score + 1.0, "score"), says("rewards", "add up")),
        (put([], "turns"), says("turns", "status")),
        (put("{}\ud800".format, "turns", 0, "text"), "invalid JSON"),
        (
            put(1e300, "turns", 0, "reward"),
            says("turns[0].reward", "1e+300", "1e+30"),
        ),
        (put(-(10**400), "turns", 0, "reward"), says("turns[0].reward", "finite number")),
        (put(float("inf"), "turns", 0, "reward"), says("turns[0].reward", "finite number")),
    ],
)
def test_a_line_that_is_no_trajectory_is_named(altered, tiny_model, tmp_path, change, message):
    said = (
        rf"altered.jsonl holds no complete group .*: 24 of 24 lines can't be read \(.*{message}.*\): 1, "
        rf"2, 3 and 21 more lines"
    )
    with pytest.raises(DataError, match=said):
        run(make_config(tiny_model, tmp_path), rollouts=altered(change))


def test_a_sibling_that_is_there_twice_is_refused(played, tiny_model, tmp_path):
    lines = played.rollouts.read_text().splitlines(keepends=True)
    path = tmp_path / "twice.jsonl"
    path.write_text("".join([*lines[:3], lines[2], *lines[4:]]))
    with pytest.raises(DataError, match=says("sibling", "weigh 2")):
        run(make_config(tiny_model, tmp_path), rollouts=path)
