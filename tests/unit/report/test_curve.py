"""The learning curve is a real picture of the numbers in metrics.jsonl."""

from __future__ import annotations

from turnwise.report.curve import learning_curve
from turnwise.report.intervals import wilson_interval


def test_curve_is_written_as_png(tmp_path):
    rows = [{"step": i, "env/A/success": i / 10, "val/env/A/success": i / 12} for i in range(10)]
    path = learning_curve(rows, tmp_path / "curve.png", "title", {"random player": 0.1})
    assert path.read_bytes().startswith(b"\x89PNG")
    other = learning_curve(rows[:2], tmp_path / "other.png", "title")
    assert other.read_bytes() != path.read_bytes()


def test_wilson_interval_holds_the_proportion_and_narrows():
    wide, narrow = wilson_interval(8, 10), wilson_interval(800, 1000)
    assert wide[0] < narrow[0] < 0.8 < narrow[1] < wide[1]
    assert wilson_interval(0, 10)[0] == 0.0 and wilson_interval(10, 10)[1] > 0.999999
