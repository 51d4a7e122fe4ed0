"""The learning curve of a run as a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

Point = tuple[float, float]


def learning_curve(
    rows: Sequence[Mapping[str, float]], path: Path, title: str, baselines: Mapping[str, float] | None = None
) -> Path:
    """Draws training and validation success (else the scores) over steps, with baselines as dashed lines.

    Args:
        rows: the rows of a `metrics.jsonl`.
        baselines: success of other players by name.
    """
    # Without a display and without touching the caller's pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = _series(rows, r"env/[^/]+/success") or _series(rows, r"rollout/score/mean")
    validation = _series(rows, r"val/env/[^/]+/success") or _series(rows, r"val/score/mean")
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, values = zip(*train, strict=True)
        axes.plot(steps, values, color="#9ecae1", linewidth=1, label="training rollouts")
    if validation:
        steps, values = zip(*validation, strict=True)
        axes.plot(steps, values, color="#08519c", linewidth=2, marker="o", markersize=4, label="held-out tasks")
    for (name, value), color in zip((baselines or {}).items(), ("#969696", "#e6550d", "#31a354", "#756bb1"), strict=False):
        axes.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{name} ({value:.2f})")
    axes.set(xlabel="step", ylabel="success", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
    return path


def _series(rows: Sequence[Mapping[str, float]], pattern: str) -> list[Point]:
    """`(step, mean over the metrics that fit)` of the rows that have any."""
    points = []
    for row in rows:
        values = [value for name, value in row.items() if re.fullmatch(pattern, name)]
        if values:
            points.append((row["step"], sum(values) / len(values)))
    return points
