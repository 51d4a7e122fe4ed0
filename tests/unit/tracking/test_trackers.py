"""Where metrics go: the file, the terminal line, the phase clock."""

from __future__ import annotations

import io

from turnwise.tracking.jsonl import JsonlTracker, read_metrics
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.tensorboard import TensorBoardTracker
from turnwise.tracking.terminal import AGENTIC_COLUMNS, TerminalTracker
from turnwise.types import Metric


def test_jsonl_round_trip_drops_a_cut_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"a": 0.1})
    tracker.log(1, {"a": 0.2})
    tracker.close()
    with path.open("a") as file:
        file.write('{"step": 2, "a"')
    assert read_metrics(path) == [{"step": 0, "a": 0.1}, {"step": 1, "a": 0.2}]


def test_terminal_line_shows_what_the_step_has():
    out = io.StringIO()
    tracker = TerminalTracker(AGENTIC_COLUMNS, num_steps=20, every=5, file=out)
    for step in range(7):
        validation = {"val/env/FrozenLake/success": 0.75} if step == 3 else {}
        tracker.log(step, {"env/FrozenLake/success": 0.5, "rollout/score/mean": 0.25} | validation)
    lines = out.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step  1/20", "step  4/20", "step  6/20"]
    assert "success 0.500" in lines[0] and "val" not in lines[0]
    assert "val 0.750" in lines[1]


def test_phases_are_measured_and_steps_reduced_once():
    class Memory:
        def __init__(self):
            self.rows = []

        def log(self, step, metrics):
            self.rows.append((step, dict(metrics)))

        def close(self):
            pass

    memory = Memory()
    log = RunLog([memory])
    for step in range(2):
        with log.phase("train"):
            log.add([Metric("x", 1.0, "sum"), Metric("x", 2.0, "sum")])
        log.end_step(step)
    assert [row["x"] for _, row in memory.rows] == [3.0, 3.0]
    assert all(row["time/step_train"] >= 0 for _, row in memory.rows)


def test_tensorboard_writes_readable_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, {"actor/pg_loss": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    [scalar] = events.Scalars("actor/pg_loss")
    assert (scalar.step, scalar.value) == (3, 0.5)
