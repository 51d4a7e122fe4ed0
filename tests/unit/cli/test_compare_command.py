"""`turnwise compare`: runs side by side, whatever their length, and one sentence for what is no run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from messages import mentions, says

from turnwise.cli.compare_command import _curve_groups, _without_copies, read_run
from turnwise.cli.main import main


@pytest.fixture
def make_run(tmp_path):
    def make(name, rows, settings=None):
        folder = tmp_path / "exp" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows))
        )
        if settings is not None:
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        return str(folder)

    return make


def trained(successes, validations=()):
    """Rows of a run: success of each step, and of validations at the first steps."""
    rows = [
        {
            "rollout/score/mean": success / 2,
            "env/Lake/success": success,
            "rollout/total_tokens": 1000.0,
            "system/samples": 8.0 * (step + 1),
            "time/step_wall": 2.0,
        }
        for step, success in enumerate(successes)
    ]
    for step, success in enumerate(validations):
        rows[step]["val/env/Lake/success"] = success
    return rows


@pytest.fixture
def compare(capsys):
    def call(*arguments):
        assert main(["compare", *arguments]) == 0
        return capsys.readouterr().out

    return call


def test_runs_of_different_lengths_stand_side_by_side(compare, make_run):
    slow = {
        "max_steps": 4,
        "seed": 1,
        "actor_train": {"training_args": {"learning_rate": 1e-5}},
        "gamma": 1.0,
    }
    fast = {
        "max_steps": 4,
        "seed": 1,
        "actor_train": {"training_args": {"learning_rate": 1e-3}},
        "gamma": 1.0,
    }
    first = make_run("a", trained([0.1, 0.2, 0.4, 0.3], [0.25, 0.75, 0.5]), slow)
    head, one, two, *rest = compare(first, make_run("b", trained([0.5, 0.9]), fast)).splitlines()
    assert " ".join(head.split()).startswith("run steps val final val best success final")
    assert one.split() == [
        "[1]",
        "exp/a",
        "4",
        "0.500",
        "0.750",
        "0.300",
        "0.400",
        "0.150",
        "0.200",
        "32",
        "4,000",
        "0:08",
    ]
    assert two.split() == [
        "[2]",
        "exp/b",
        "2",
        "of",
        "4",
        "-",
        "-",
        "0.900",
        "0.900",
        "0.450",
        "0.450",
        "16",
        "2,000",
        "0:04",
    ]
    assert any(line.split() == ["actor_train.training_args.learning_rate", "1e-05", "0.001"] for line in rest)
    assert not any("seed" in line or "gamma" in line for line in rest)


def test_an_experiment_s_folder_means_all_of_its_runs(compare, make_run, tmp_path):
    for name in ("a", "b", "c"):
        make_run(name, trained([0.5]), {"seed": 1})
    text = compare(str(tmp_path / "exp"))
    assert "[3] exp/c" in " ".join(text.split()) and mentions(text, "same settings")


def test_a_final_value_is_a_mean_where_every_step_has_one(compare, make_run):
    run = make_run("a", trained([0.0] * 16 + [1.0, 0.0, 1.0, 0.0]))
    values = compare(run, "--metric", "env/*/success").splitlines()[1].split()
    assert values[3:5] == ["0.5", "0.5"], "two steps of twenty"


def test_the_best_loss_is_the_lowest_and_runs_of_fine_tuning_are_runs_too(compare, make_run):
    run = make_run(
        "a", [{"sft/loss": loss, "sft/val_loss": loss, "time/step_train": 1.0} for loss in (3.0, 1.0, 2.0)]
    )
    losses = ["2.0000", "1.0000"] * 2
    assert compare(run).splitlines()[1].split() == ["[1]", "exp/a", "3", *losses, "-", "-", "0:03"]


def test_a_line_that_a_kill_cut_is_left_out_and_nan_is_no_value(compare, make_run):
    run = make_run("a", trained([0.25, 0.5, float("nan")]))
    with (Path(run) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "x')
    assert compare(run, "--metric", "env/Lake/success").splitlines()[1].split()[2:5] == ["3", "0.5", "0.5"]


def test_curves_are_drawn_for_runs_of_any_length(compare, make_run, tmp_path):
    runs = [make_run("$LR_$SEED", trained([0.1] * 40, [0.1, 0.2])), make_run("b", trained([0.5]))]
    assert "curves" in compare(*runs, "--out", str(tmp_path / "curves.png")), (
        "and the name of a run is no formula"
    )
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_settings_that_can_t_be_read_are_said_and_the_rest_is_compared(make_run, capsys):
    run = make_run("a", trained([0.5]))
    other = make_run("b", trained([0.5]), {"seed": 1})
    (Path(run) / "config.yaml").write_bytes(b"\xff\xfe\x00 garbage: [")
    assert main(["compare", run, other]) == 0
    captured = capsys.readouterr()
    assert mentions(captured.err, "config.yaml", "read") and "[2]" in captured.out
    assert "settings that differ" not in captured.out
    assert main(["compare", run, other, make_run("c", trained([0.5]), {"seed": 2})]) == 0
    assert re.search(r"\nseed +\? +1 +2\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: None, says("run folder", "metrics.jsonl")),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), says("no step", "ended")),
        (lambda folder: (folder / "metrics.jsonl").write_text("no JSON\n"), "metrics.jsonl is damaged"),
        (lambda folder: (folder / "metrics.jsonl").write_text("[1]\n"), "metrics.jsonl is damaged"),
        (lambda folder: (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n"), "metrics.jsonl is damaged"),
        (lambda folder: folder.rmdir(), says("no such folder")),
    ],
)
def test_what_is_no_run_gets_one_sentence(refused, tmp_path, spoil, sentence):
    folder = tmp_path / "run"
    folder.mkdir()
    spoil(folder)
    said = refused("compare", folder)
    assert said.startswith("error: ") and re.search(sentence, said) and len(said.splitlines()) == 1


def test_a_metric_that_no_run_has_names_the_nearest(refused, make_run):
    said = refused("compare", make_run("a", trained([0.5])), "--metric", "env/Lake/sucess")
    assert "Did you mean 'env/Lake/success'?" in said


def test_a_picture_has_a_picture_s_ending(refused, make_run, tmp_path):
    assert ".png" in refused("compare", make_run("a", trained([0.5])), "--out", tmp_path / "x.txt")


def test_a_metric_without_a_better_end_has_no_best(compare, make_run):
    rows = [{**row, "actor/entropy": 0.5} for row in trained([0.1, 0.2])]
    table = (
        compare(make_run("a", rows), "--metric", "actor/entropy", "--metric", "rollout/score/mean")
        .splitlines()[1]
        .split()
    )
    assert table[3:7] == ["0.5", "-", "0.1", "0.1"]


def test_curves_are_named_by_what_differs_and_seeds_are_one_curve(make_run):
    def run_of(name, seed, rate):
        return read_run(
            Path(make_run(name, trained([0.1]), {"seed": seed, "critic": {"learning_rate": rate}}))
        )

    groups = _curve_groups([run_of("a", 1, 0.1), run_of("b", 2, 0.1), run_of("c", 1, 0.3)])
    assert {label: len(runs) for label, runs in groups.items()} == {
        "learning_rate=0.1": 2,
        "learning_rate=0.3": 1,
    }
    assert list(_curve_groups([run_of("d", 1, 0.1), run_of("e", 2, 0.1)])) == ["all runs"]
    assert len(_curve_groups([run_of("f", 1, 0.1), run_of("g", 1, 0.1)])) == 2


def test_a_curve_that_differs_in_many_settings_is_named_by_its_runs(make_run):
    def run_of(name, seed, value):
        settings = {"seed": seed, **{f"a_long_name_of_a_setting_{n}": value for n in range(9)}}
        return read_run(Path(make_run(name, trained([0.1]), settings)))

    labels = list(_curve_groups([run_of("a", 1, 1), run_of("b", 2, 2), run_of("c", 3, 1)]))
    assert [label[: label.index("]") + 1] for label in labels] == ["[1, 3]", "[2]"]
    assert max(map(len, labels)) <= 60


def test_a_panel_that_shows_another_ones_curves_is_left_out():
    curves = {"a": [[(1, 0.5)]]}
    assert list(_without_copies({"success": curves, "score": dict(curves), "val": {"a": [[(0, 0.5)]]}})) == [
        "success",
        "val",
    ]
