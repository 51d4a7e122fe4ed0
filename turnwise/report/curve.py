"""Learning curves of runs as pictures."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.report.intervals import wilson_interval
from turnwise.report.picture_file import write_figure
from turnwise.report.series import Point, Row, columns, mean_curve, metric_series, smooth, values_by_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], None]

_TRAIN = "#6baed6"
_VAL = "#08519c"
_COLORS = ("#4c9085", "#c26a3d", "#7b6ba8", "#9a9a9a", "#b8a13c", "#a04d6e")
_MARGINS = {
    "left": 0.1,
    "right": 0.98,
    "top": 0.94,
    "bottom": 0.1,
    "hspace": 0.32,
    "wspace": 0.32,
}
_PHASES = ("rollout", "train", "val", "checkpoint")
_SHARES = {
    "groups alike": r"rollout/zero_variance_groups",
    "parsed": r"rollout/parsed",
    "valid": r"env/.+/action_is_valid",
}
_KL = {"in the reward": "critic/kl", "in the loss": "actor/kl_loss", "of an update": "actor/approxkl"}
_CURVE_PANELS: tuple[tuple[str, Mapping[str, str], float | None], ...] = (
    ("entropy (nats per token)", {"": r"actor/entropy"}, None),
    ("KL (nats per token)", _KL, None),
    ("gradient norm", {"": r"(actor_train|sft)/grad_norm"}, None),
    ("shares", _SHARES, 1.05),
)
"""The small panels of curves: their title, patterns of metrics by label, and the y-axis's upper end (None =
automatic)."""


def learning_curve(
    rows: Sequence[Row],
    path: Path,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Writes the `curve_figure` of a run to `path`, in the format of its ending, and returns `path`."""
    write_figure(curve_figure(rows, title, baselines), path)
    return path


def curve_figure(
    rows: Sequence[Row],
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> "Figure":
    """Draws success (the score if success isn't measured, the loss in fine-tuning) over the steps of a run,
    in training and in validation, with dashed lines for the model before training and for a random player,
    where these are known. Small panels show, if there are data, entropy, KL, gradient norm, the seconds of a
    step, and shares (of groups with equal scores, of parsed responses, of valid actions). Success in
    validation has its 95% Wilson interval, which assumes independent episodes. pyplot isn't used.

    Args:
        rows: the rows of a `metrics.jsonl`, of reinforcement learning or of fine-tuning.
        baselines: success of more players by name, for dashed lines too.
    """
    from matplotlib.figure import Figure

    class CurveFigure(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=100)
            return picture.getvalue()

    is_fine_tuning = bool(metric_series(rows, r"sft/loss"))
    panels = _panels(rows)
    if panels:
        figure = CurveFigure(figsize=(8, 6))
        grid = figure.add_gridspec(2, len(panels), height_ratios=[2, 1])
    else:
        figure = CurveFigure(figsize=(8, 4))
        grid = figure.add_gridspec(1, 1)
    main = figure.add_subplot(grid[0, :])
    if is_fine_tuning:
        _draw_loss(main, rows)
    else:
        _draw_success(main, rows, baselines or {})
    main.set_title(_literal(title))
    # If the group filter left nothing to train on, there may be no curve.
    if main.get_legend_handles_labels()[0]:
        # Success may lie anywhere: the legend goes where it hides least of it.
        main.legend(loc="upper right" if is_fine_tuning else "best", fontsize=8)
    for column, (name, draw) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[1, column])
        draw(axes)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
    # Fixed margins, since an automatic layout draws everything twice.
    figure.subplots_adjust(**_MARGINS)
    for axes in figure.axes:
        _whole_steps(axes, max_ticks=10 if axes is main else 5)
        axes.set_xlabel("step", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def compared_curves(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[Point]]]], path: Path, over: str = "step"
) -> Path:
    """Draws a panel for each entry of `panels` into `path`: title → label → one curve for each run of that
    label. The line is the smoothed mean of these runs, the points are the steps themselves, and the band
    reaches from the lowest to the highest run. `over` says what is counted below."""
    from matplotlib.figure import Figure

    height = 1 + 3 * len(panels)
    figure = Figure(figsize=(8, height), layout="constrained")
    for number, (title, groups) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(len(panels), 1, number)
        for index, (label, curves) in enumerate(groups.items()):
            not_empty = [curve for curve in curves if curve]
            if not_empty:
                _draw_group(axes, not_empty, f"C{index}", label)
        axes.set_ylabel(_literal(title))
        axes.set_xlabel(over, fontsize=8)
        _whole_steps(axes)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    write_figure(figure, path)
    return path


def _draw_group(
    axes: "Axes",
    curves: Sequence[Sequence[Point]],
    color: str,
    label: str,
) -> None:
    """Draws runs that differ in their seed only as one curve."""
    means = mean_curve(curves)
    smooth_means = smooth(means)
    axes.plot(
        *columns(means),
        color=color,
        linestyle="",
        marker="o",
        markersize=2.5,
        alpha=0.35,
    )
    if len(curves) == 1:
        axes.plot(
            *columns(smooth_means),
            color=color,
            label=_literal(label),
        )
        return
    name = f"{label} (mean of {len(curves)} runs)"
    axes.plot(
        *columns(smooth_means),
        color=color,
        label=_literal(name),
    )
    smooth_values = values_by_step([list(dict(smooth(curve)).items()) for curve in curves])
    steps = [step for step, _ in smooth_means if step in smooth_values]
    lows = [min(smooth_values[step]) for step in steps]
    highs = [max(smooth_values[step]) for step in steps]
    axes.fill_between(
        steps,
        lows,
        highs,
        color=color,
        alpha=0.15,
        linewidth=0,
    )


def _whole_steps(axes: "Axes", max_ticks: int = 10) -> None:
    """Lets the axis of steps have ticks at whole steps only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(
        MaxNLocator(
            max_ticks,
            integer=True,
            min_n_ticks=1,
        )
    )


def _literal(text: str) -> str:
    """The text with escaped `$`, since matplotlib would read what stands between two of them as a formula."""
    return text.replace("$", r"\$")


def _draw_success(
    axes: "Axes",
    rows: Sequence[Row],
    baselines: Mapping[str, float],
) -> None:
    train = metric_series(rows, r"env/.+/success")
    held_out = metric_series(rows, r"val/env/.+/success")
    is_success = bool(train or held_out)
    if not is_success:
        train = metric_series(rows, r"rollout/score/mean")
        held_out = metric_series(rows, r"val/score/mean")
    _draw_pair(axes, train, held_out, "training rollouts", "validation tasks")
    if is_success:
        _draw_intervals(axes, rows, held_out)
    lines = {**_measured_lines(rows, held_out or train, is_success), **baselines}
    for (name, value), color in zip(lines.items(), _COLORS[1:] * len(lines), strict=False):
        axes.axhline(
            value,
            color=color,
            linestyle="--",
            linewidth=1,
            label=f"{_literal(name)} ({value:.2f})",
        )
    axes.set_ylabel("success" if is_success else "score")
    if is_success:
        axes.set_ylim(0, 1.02)


def _draw_intervals(
    axes: "Axes",
    rows: Sequence[Row],
    successes: Sequence[Point],
) -> None:
    """Draws the Wilson intervals of validations as a band."""
    counts = dict(metric_series(rows, r"val/num_episodes"))
    steps = []
    lows = []
    highs = []
    for step, success in successes:
        if step in counts:
            count = counts[step]
            low, high = wilson_interval(round(success * count), round(count))
            steps.append(step)
            lows.append(low)
            highs.append(high)
    if steps:
        axes.fill_between(
            steps,
            lows,
            highs,
            color=_VAL,
            alpha=0.15,
            linewidth=0,
        )


def _measured_lines(
    rows: Sequence[Row],
    points: Sequence[Point],
    is_success: bool,
) -> dict[str, float]:
    """Lines that the run has measured itself: the first validation, or else the first step's rollouts, is of
    the model before training; a random player plays only in a run that seems to learn nothing."""
    lines: dict[str, float] = {}
    if len(points) > 1 and points[0][0] <= 1:
        lines["before training"] = points[0][1]
    random = metric_series(rows, r"random_player/success")
    if is_success and random:
        lines["random player"] = random[-1][1]
    return lines


def _draw_loss(axes: "Axes", rows: Sequence[Row]) -> None:
    train = metric_series(rows, r"sft/loss")
    _draw_pair(
        axes, train, metric_series(rows, r"sft/val_loss"), "training batches", "validation demonstrations"
    )
    axes.set_ylabel("nats a trained token")
    if min(value for _, value in train) > 0:
        axes.set_yscale("log", subs=[2, 5])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def _draw_pair(
    axes: "Axes",
    train: Sequence[Point],
    held_out: Sequence[Point],
    train_label: str,
    held_out_label: str,
) -> None:
    """Draws a metric in training, raw and smoothed, and in validation."""
    if train:
        axes.plot(
            *columns(train),
            color=_TRAIN,
            linewidth=0.8,
            alpha=0.5,
        )
        axes.plot(
            *columns(smooth(train)),
            color=_TRAIN,
            linewidth=2,
            label=f"{train_label}, smoothed",
        )
    if held_out:
        axes.plot(
            *columns(held_out),
            color=_VAL,
            linewidth=2,
            marker="o",
            markersize=4,
            label=held_out_label,
        )


def _panels(rows: Sequence[Row]) -> dict[str, Draw]:
    """The small panels that these rows can fill, by title. A KL that is 0 throughout is off, and isn't
    drawn."""
    panels: dict[str, Draw] = {}
    for title, patterns, top in _CURVE_PANELS:
        curves = {}
        for label, pattern in patterns.items():
            points = metric_series(rows, pattern)
            is_off = patterns is _KL and not any(value for _, value in points)
            if points and not is_off:
                curves[label] = points
        if curves:
            panels[title] = partial(_draw_curves, curves=curves, top=top)
    times = _seconds_by_phase(rows)
    if any(any(seconds) for seconds in times.values()):
        panels["seconds of a step"] = partial(_draw_times, rows=rows)
    return panels


def _draw_curves(
    axes: "Axes",
    curves: Mapping[str, Sequence[Point]],
    top: float | None,
) -> None:
    """Draws the curves, with a legend unless the only label is "". `top` is the y-axis's upper end; None =
    automatic."""
    for (label, points), color in zip(curves.items(), _COLORS, strict=False):
        axes.plot(
            *columns(points),
            color=color,
            linewidth=1,
            label=label,
        )
    if top is not None:
        axes.set_ylim(-0.05, top)
    if any(curves):
        # Above the panel's top, since shares lie anywhere between 0 and 1.
        if top is not None:
            axes.set_ylim(-0.05, top + 0.2 * len(curves))
            axes.set_yticks([0, 0.5, 1])
        axes.legend(fontsize=6, loc="upper right")


def _draw_times(axes: "Axes", rows: Sequence[Row]) -> None:
    """Stacks the seconds of the phases. A phase that takes 1% of all these seconds or less is left out."""
    times = _seconds_by_phase(rows)
    total = sum(map(sum, times.values()))
    long_phases = {phase: seconds for phase, seconds in times.items() if sum(seconds) > 0.01 * total}
    axes.stackplot(
        [row["step"] + 1 for row in rows],
        list(long_phases.values()),
        labels=long_phases,
        colors=_COLORS,
        linewidth=0,
        step="mid",
    )
    _, top = axes.get_ylim()
    axes.set_ylim(0, top * (1 + 0.15 * len(long_phases)))  # the legend is above the bars
    axes.legend(fontsize=6, loc="upper right")


def _seconds_by_phase(rows: Sequence[Row]) -> dict[str, list[float]]:
    return {phase: [row.get(f"time/step_{phase}", 0.0) for row in rows] for phase in _PHASES}
