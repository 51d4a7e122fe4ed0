"""The learning curve is a real picture of the numbers in metrics.jsonl."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from turnwise.report.curve import compared_curves, curve_figure, learning_curve
from turnwise.report.intervals import wilson_interval
from turnwise.report.series import counted, mean_curve, smooth

SUCCESS = [{"step": i, "env/A/success": i / 10, "val/env/A/success": i / 12} for i in range(10)]


def drawn(rows, tmp_path, title="title", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = learning_curve(rows, tmp_path / "curve.png", title, **options)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return drawn(SUCCESS, tmp_path_factory.mktemp("whole"))


def test_curve_is_a_picture_of_its_rows(whole, tmp_path):
    assert not np.array_equal(whole, drawn(SUCCESS[:5], tmp_path))
    assert not np.array_equal(whole, drawn(SUCCESS, tmp_path, baselines={"random player": 0.1}))
    five, six = ({f"player {i}": i / 9 for i in range(number)} for number in (5, 6))
    assert not np.array_equal(
        drawn(SUCCESS, tmp_path, baselines=five), drawn(SUCCESS, tmp_path, baselines=six)
    )
    of_a_path = [
        {name.replace("/A/", "/openai/gsm8k/"): value for name, value in row.items()} for row in SUCCESS
    ]
    assert np.array_equal(whole, drawn(of_a_path, tmp_path)), "a tag may hold slashes"


def test_names_with_dollar_signs_are_no_formulas(whole, tmp_path):
    assert not np.array_equal(whole, drawn(SUCCESS, tmp_path, title="run_$LR_$SEED", baselines={"$_$": 0.1}))


def test_validation_is_called_validation_since_nothing_need_be_held_out(tmp_path, monkeypatch):
    labels = []
    plot = Axes.plot

    def noted(axes, *values, label=None, **options):
        labels.append(label)
        return plot(axes, *values, label=label, **options)

    monkeypatch.setattr(Axes, "plot", noted)
    drawn(SUCCESS, tmp_path)
    drawn([{"step": 0, "sft/loss": 1.0}, {"step": 1, "sft/loss": 0.5, "sft/val_loss": 0.6}], tmp_path)
    said = {label for label in labels if label and "training" not in label}
    assert said == {"validation tasks", "validation demonstrations"}


def test_the_number_of_episodes_draws_an_interval(tmp_path):
    counted = [row | {"val/num_episodes": 20.0} for row in SUCCESS]
    few, many = (
        drawn(counted, tmp_path),
        drawn([row | {"val/num_episodes": 2000.0} for row in SUCCESS], tmp_path),
    )
    background = 255 * 3
    assert (few.sum(axis=-1) < background).sum() > (many.sum(axis=-1) < background).sum()


@pytest.mark.parametrize(
    "changes",
    [
        {"actor/entropy": float("nan")},
        {
            "actor/entropy": 0.5,
            "critic/kl": 0.1,
            "actor/kl_loss": 0.2,
            "time/step_rollout": 1.0,
            "time/step_train": 2.0,
        },
        {"time/step_log": 1.0},
    ],
)
def test_panels_come_and_go_with_their_metrics(changes, tmp_path):
    drawn([row | changes for row in SUCCESS], tmp_path)


@pytest.mark.parametrize("name", ["actor_train/grad_norm", "rollout/zero_variance_groups", "rollout/parsed"])
def test_what_tells_that_nothing_is_learnt_is_drawn_where_it_is_zero_too(name, whole, tmp_path):
    zero = drawn([row | {name: 0.0} for row in SUCCESS], tmp_path)
    one = drawn([row | {name: 1.0} for row in SUCCESS], tmp_path)
    assert zero.shape != whole.shape and not np.array_equal(zero, one)


def test_scores_are_drawn_where_nothing_succeeds(tmp_path):
    rows = [{"step": i, "rollout/score/mean": -20.0 + i, "val/score/mean": -21.0 + i} for i in range(5)]
    assert (drawn(rows, tmp_path) < 250).any()


def test_a_run_that_trained_on_nothing_has_a_picture(tmp_path):
    drawn([{"step": i, "rollout/filtered": 8.0} for i in range(3)], tmp_path)


def test_fine_tuning_has_a_curve_too(tmp_path):
    rows = [
        {"step": i, "sft/loss": 5.0 / (i + 1), "sft/grad_norm": 1.0, "time/step_train": 0.1}
        for i in range(30)
    ]
    rows.append({"step": 30, "sft/val_loss": 0.2})
    assert not np.array_equal(drawn(rows, tmp_path), drawn(rows[:-1], tmp_path))


def test_wilson_interval_holds_the_proportion_and_narrows():
    wide, narrow = wilson_interval(8, 10), wilson_interval(800, 1000)
    assert wide[0] < narrow[0] < 0.8 < narrow[1] < wide[1]
    assert wilson_interval(0, 10)[0] == 0.0 and wilson_interval(10, 10)[1] > 0.999999


def test_a_smoothed_curve_ends_where_its_window_ends():
    points = [(step, 0.0) for step in range(40)] + [(40, 100.0)]
    means = smooth(points)
    assert [means[0][0], means[-1][0]] == [2, 38]
    assert means[-1][1] == pytest.approx(20.0), "the last value is a mean, not the last step"
    assert smooth(points[-19:]) == points[-19:]


def test_steps_count_from_1_and_validations_stay_where_they_were_made():
    assert counted([(0, 0.5)], "rollout/score/mean") == [(1, 0.5)]
    assert counted([(30, 0.5)], "val/env/*/success") == [(30, 0.5)]
    rows = [{"step": 30, "env/A/success": 0.1, "val/env/A/success": 0.2}]
    axes = curve_figure(rows, "title").axes[0]
    assert {tuple(line.get_xdata()) for line in axes.get_lines()} == {(31,), (30,)}


def test_lines_of_the_model_before_training_and_of_the_random_player_are_drawn_where_they_are_known():
    def lines(rows, **baselines):
        drawn = curve_figure(rows, "title", baselines).axes[0].get_lines()
        return {line.get_label(): line.get_ydata()[0] for line in drawn if line.get_linestyle() == "--"}

    validated = [
        {"step": 0, "env/A/success": 0.2, "val/env/A/success": 0.25},
        {"step": 2, "val/env/A/success": 0.5},
    ]
    assert lines(validated) == {"before training (0.25)": 0.25}
    rollouts = [{"step": step, "env/A/success": 0.2 + step / 10} for step in range(3)]
    rollouts[2]["random_player/success"] = 0.1
    assert lines(rollouts) == {"before training (0.20)": 0.2, "random player (0.10)": 0.1}
    assert lines(rollouts, **{"random player": 0.3})["random player (0.30)"] == 0.3
    assert lines(rollouts[1:2]) == {}, "a file that was cut doesn't begin with the model before training"


def test_runs_of_one_label_are_one_curve_with_points_and_a_band(tmp_path, monkeypatch):
    drawn, bands = [], []
    plot, fill = Axes.plot, Axes.fill_between
    monkeypatch.setattr(
        Axes, "plot", lambda axes, *values, **more: drawn.append(values) or plot(axes, *values, **more)
    )
    monkeypatch.setattr(
        Axes,
        "fill_between",
        lambda axes, *values, **more: bands.append(values) or fill(axes, *values, **more),
    )
    curves = {"rate=1": [[(1, 0.0), (2, 0.0)], [(1, 1.0), (2, 0.5)]], "rate=2": [[(1, 0.2)]]}
    compared_curves({"score": curves}, tmp_path / "compared.png")
    assert ([1, 2], [0.5, 0.25]) in drawn and ([1], [0.2]) in drawn
    assert bands == [([1, 2], [0.0, 0.0], [1.0, 0.5])]


def test_runs_that_were_validated_at_different_steps_have_no_jumps_in_their_mean():
    often = [(0, 0.6), (1, 0.8), (2, 1.0)]
    seldom = [(0, 0.0), (2, 0.2)]
    assert dict(mean_curve([often, seldom])) == pytest.approx({0: 0.3, 1: 0.45, 2: 0.6})
    # Nothing is made up beyond a run.
    assert mean_curve([often, [(1, 0.0)]]) == [(0, 0.6), (1, 0.4), (2, 1.0)]


def test_no_legend_lies_on_what_it_explains():

    rows = [
        {
            "step": step,
            "env/A/success": 0.05,
            "time/step_rollout": 1.0,
            "time/step_train": 2.0,
            "time/step_val": 1.0,
        }
        for step in range(12)
    ]
    figure = curve_figure(rows, "exp")
    figure.canvas.draw()
    success, *_, seconds = figure.axes
    legend = success.get_legend().get_window_extent()
    assert legend.y0 > success.transData.transform((0, 0.05))[1], "the curve is low, and the legend above it"
    assert seconds.get_legend().get_window_extent().y0 > seconds.transData.transform((0, 4.0))[1]
