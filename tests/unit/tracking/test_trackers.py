"""Where metrics go: the file, the terminal line, the phase clock."""

from __future__ import annotations

import io
import logging

from small_runs import run_small, small_config

from turnwise.protocols import NO_TEXTS, StepTexts
from turnwise.tracking.jsonl import JsonlTracker, read_metrics
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS, SFT_COLUMNS
from turnwise.tracking.pace import Pace
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.store import StoreTracker, TrackedRun
from turnwise.tracking.tensorboard import TensorBoardStore
from turnwise.tracking.terminal import TerminalHandler, TerminalTracker
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
    tracker = TerminalTracker(AGENTIC_COLUMNS, Pace(20), every=5, file=out)
    for step in range(7):
        validation = {"val/env/FrozenLake/success": 0.75} if step == 3 else {}
        tracker.log(step, {"env/FrozenLake/success": 0.5, "rollout/score/mean": 0.25} | validation)
    lines = out.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step  1/20", "step  4/20", "step  6/20"]
    assert "success 0.500" in lines[0] and "val" not in lines[0]
    assert "val 0.750" in lines[1]


def test_a_validation_is_printed_whatever_it_measures():
    out = io.StringIO()
    tracker = TerminalTracker(SFT_COLUMNS, Pace(20), every=10, file=out)
    for step in range(1, 4):
        tracker.log(step, {"sft/loss": 1.0} | ({"sft/val_loss": 2.0} if step == 2 else {}))
    tracker.log(20, {"sft/val_loss": 1.5})
    assert out.getvalue().splitlines() == [
        "step  3/20  loss 1.0000  val 2.0000 (after 2)",
        "final  val 1.5000",
    ]


def test_log_lines_go_to_what_standard_error_is_when_they_come(monkeypatch):
    handler = TerminalHandler()
    stand_in = io.StringIO()
    monkeypatch.setattr("sys.stderr", stand_in)
    handler.handle(logging.LogRecord("turnwise", logging.WARNING, "", 0, "%d lost", (3,), None))
    assert stand_in.getvalue() == "3 lost\n"


class Memory:
    """A tracker that remembers."""

    def __init__(self):
        self.rows = []

    def log(self, step, metrics, texts):
        self.rows.append((step, dict(metrics)))
        self.texts = texts


class Onlooker(Memory):
    def begin_phase(self, name):
        self.rows.append(name)


def test_phases_are_measured_and_steps_reduced_once():
    memory = Memory()
    log = RunLog([memory])
    for step in range(2):
        with log.phase("train"):
            log.add([Metric("x", 1.0, "sum"), Metric("x", 2.0, "sum")])
        log.end_step(step)
    assert [row["x"] for _, row in memory.rows] == [3.0, 3.0]
    assert all(row["time/step_train"] >= 0 for _, row in memory.rows)
    assert ["time/step_log" in row for _, row in memory.rows] == [False, True]


def test_onlookers_hear_of_phases_and_all_get_the_texts_of_their_step():
    memory, onlooker = Memory(), Onlooker()
    log = RunLog([memory, onlooker])
    with log.phase("rollout"):
        log.show("an episode", "an episode turn by turn")
    log.end_step(7)
    *told, (step, row) = onlooker.rows
    assert told == ["rollout", "log"]
    assert step == 7 and list(row) == ["time/step_rollout"]
    assert memory.texts == onlooker.texts == StepTexts({}, "an episode", "an episode turn by turn")
    log.end_step(8)
    assert memory.texts == NO_TEXTS


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_a_resumed_run_replaces_the_steps_that_it_does_again(tmp_path):
    for first_step, value in ((0, 0.5), (2, 0.25)):
        run = TrackedRun(tmp_path, "lake", "first", first_step)
        tracker = StoreTracker("tensorboard", lambda run=run: TensorBoardStore(run, str(tmp_path)))
        for step in range(first_step, 4):
            tracker.log(step, {"a/x": value, "y": 1.0, "val/x": step / 10})
        tracker.close()
    events = events_of(tmp_path)
    assert len(events.Scalars("y")) == 4
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("a/x")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.25),
        (4, 0.25),
    ]
    validations = {scalar.step: round(scalar.value, 3) for scalar in events.Scalars("val/x")}
    assert validations == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3}, "after so many steps"


def test_a_training_run_leaves_settings_and_sample_texts_in_tensorboard(tiny_model, tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run_small(small_config(tiny_model, tmp_path, max_steps=2, seed=7, track_with=["tensorboard"]))
    [folder] = tmp_path.glob("*/*/tensorboard")
    events = events_of(folder)
    plugins = events.PluginTagToContent
    [start] = plugins("hparams").values()
    settings = HParamsPluginData.FromString(start).session_start_info.hparams
    assert settings["seed"].number_value == 7 and settings["train_env_manager.group_size"].number_value == 4
    assert settings["adv_estimator"].string_value == "grpo" and settings["deterministic"].bool_value is False
    assert list(plugins("text")) == ["samples"]
    first, second = events.Tensors("samples")
    assert (first.step, second.step) == (1, 2)
    text = first.tensor_proto.string_val[0].decode()
    assert (
        "step 1, best trajectory" in text
        and "turn 1" in text
        and all(line.startswith("    ") for line in text.splitlines())
    )
    assert len(events.Scalars("rollout/score/mean")) == 2
