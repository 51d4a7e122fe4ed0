"""A library that keeps runs may fail or hang as it likes; and what each of them is told, by small
stand-ins."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
from small_runs import run_small, small_config

from turnwise.errors import NotAvailableError
from turnwise.protocols import StepTexts
from turnwise.tracking import store
from turnwise.tracking.store import StoreTracker, TrackedRun
from turnwise.tracking.swanlab_store import SwanlabStore
from turnwise.tracking.wandb_store import WandbStore


class Memory:
    """Keeps what it is given, fails at the step `bad`, and waits at the step `slow` until it is let go. If it
    `closes_badly`, `close` fails."""

    place = "here"

    def __init__(self, bad=None, slow=None, closes_badly=False):
        self.bad, self.slow, self.let_go = bad, slow, threading.Event()
        self.rows, self.is_closed = [], threading.Event()
        self.closes_badly, self.num_closed = closes_badly, 0

    def write(self, step, metrics, text):
        if step == self.bad:
            raise OSError("the server is\ngone")
        if step == self.slow:
            self.let_go.wait(60)
        self.rows.append((step, dict(metrics), text))

    def close(self):
        self.num_closed += 1
        if self.closes_badly:
            raise OSError("the last upload failed")
        self.is_closed.set()


def test_steps_and_texts_arrive_in_order_and_the_end_closes():
    memory = Memory()
    tracker = StoreTracker("wandb", lambda: memory)
    tracker.log(0, {"x": 0.5})
    tracker.log(1, {"x": 0.25}, StepTexts(samples="an episode"))
    tracker.log(2, {"x": 0.125, "val/x": 0.1})
    tracker.log(3, {"val/x": 0.2, "sft/val_loss": 0.3})
    tracker.close()
    tracker.close()
    trained = [(1, {"x": 0.5}, ""), (2, {"x": 0.25}, "an episode")]
    validated = [(2, {"val/x": 0.1}, ""), (3, {"x": 0.125}, ""), (3, {"val/x": 0.2, "sft/val_loss": 0.3}, "")]
    assert memory.rows == trained + validated, "as people count: after so many steps"
    assert memory.is_closed.is_set()


def test_a_failure_is_said_once_and_turns_the_tracker_off(caplog):
    memory = Memory(bad=2)
    tracker = StoreTracker("mlflow", lambda: memory)
    for step in range(4):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == "mlflow gets nothing more: OSError: the server is gone; metrics.jsonl has every step"
    assert [step for step, *_ in memory.rows] == [1]
    assert memory.is_closed.wait(60)


@pytest.mark.parametrize("fault", [{"closes_badly": True}, {"slow": 1, "bad": 2}], ids=["close", "write"])
def test_it_is_closed_once_whatever_fails_in_the_end(caplog, monkeypatch, fault):
    monkeypatch.setattr(store, "WRITE_S", 0.01)
    memory = Memory(**fault)
    tracker = StoreTracker("wandb", lambda: memory)
    for step in range(2):
        tracker.log(step, {"x": 1.0})
    memory.let_go.set()
    tracker.close()
    tracker._thread.join(60)
    assert memory.num_closed == 1
    assert caplog.text.count("wandb gets nothing more: OSError: the ") == 1


def test_one_that_hangs_costs_a_step_its_wait_once_and_the_end_another(caplog, monkeypatch):
    monkeypatch.setattr(store, "WRITE_S", 0.01)
    monkeypatch.setattr(store, "CLOSE_S", 0.01)
    memory = Memory(slow=1)
    tracker = StoreTracker("swanlab", lambda: memory)
    for step in range(50):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert "swanlab did not take everything within 0.01 s; metrics.jsonl has every step" in caplog.text
    memory.let_go.set()
    assert memory.is_closed.wait(60)
    assert [step for step, *_ in memory.rows] == list(range(1, 51))


def test_one_that_cannot_start_is_refused_with_the_arguments_that_need_no_login(monkeypatch):
    def start():
        raise RuntimeError("no API key")

    with pytest.raises(NotAvailableError) as refused:
        StoreTracker("wandb", start)
    assert str(refused.value) == (
        "track_with wandb can't start: RuntimeError: no API key; tracker_kwargs {wandb: {mode: offline}} "
        "needs neither network nor login, and without wandb in track_with the run keeps metrics.jsonl"
    )
    monkeypatch.setattr(store, "START_S", 0.01)
    never = threading.Event()
    with pytest.raises(
        NotAvailableError,
        match=r"mlflow can't start: TimeoutError: it did not answer within 0.01 s; .*sqlite",
    ):
        StoreTracker("mlflow", lambda: never.wait(60))
    never.set()


def test_one_that_stops_working_does_not_end_the_run_and_all_are_closed(
    tiny_model, tmp_path, monkeypatch, capsys
):
    told = {}

    class Failing(Memory):
        def __init__(self, run, **arguments):
            super().__init__(bad=2)
            told.update(run=run, arguments=arguments, store=self)

    monkeypatch.setattr("turnwise.tracking.tensorboard.TensorBoardStore", Failing)
    kwargs = {"track_with": ["tensorboard"], "tracker_kwargs": {"tensorboard": {"log_dir": "secret"}}}
    run_small(small_config(tiny_model, tmp_path, max_steps=3, seed=7, **kwargs))
    assert capsys.readouterr().err.count("tensorboard gets nothing more") == 1
    run, memory = told["run"], told["store"]
    [(step, row, text)] = memory.rows
    assert step == 1 and "rollout/score/mean" in row and "best trajectory" in text
    assert memory.is_closed.wait(60)
    assert told["arguments"] == {"log_dir": "secret"}
    assert (run.project, run.first_step) == ("letters", 0)
    assert (run.settings["seed"], run.settings["train_env_manager.group_size"]) == (7, 4)
    assert not [name for name in run.settings if name.startswith("tracker_kwargs")]


class Recorder:
    """Takes every call, and notes it by name."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def called(*arguments, **named):
            self.calls.append((name, *arguments, named))
            return named or arguments

        return called


def library(monkeypatch, name, **contents):
    """A stand-in for a library that notes what its run is told."""
    run = Recorder()
    run.url, run.dir, told = None, "a folder", {}

    def init(**arguments):
        told.update(arguments)
        return run

    module = ModuleType(name)
    vars(module).update(init=init, Settings=dict, **contents)
    monkeypatch.setitem(sys.modules, name, module)
    return told, run


def test_wandb_is_told_the_run_and_never_asks_anybody(monkeypatch, tmp_path):
    setup = []
    told, run = library(monkeypatch, "wandb", setup=setup.append, Html=lambda text: ("html", text))
    run_facts = TrackedRun(tmp_path, "lake", "first", 0, {"seed": 7})
    kept = WandbStore(
        run_facts, api_key="k", project="ours", mode="offline", settings={"x_stats_sampling_interval": 5}
    )
    assert setup == [{"silent": True, "console": "off"}]
    assert told == {
        "project": "ours",
        "name": "first",
        "dir": tmp_path,
        "mode": "offline",
        "config": {"seed": 7},
        "settings": {"silent": True, "console": "off", "api_key": "k", "x_stats_sampling_interval": 5},
    }
    kept.write(3, {"x": 0.5}, "<b>")
    kept.close()
    assert run.calls == [
        ("log", {"x": 0.5, "samples": ("html", "<pre>&lt;b&gt;</pre>")}, {"step": 3}),
        ("finish", {}),
    ]


def test_swanlab_is_told_the_run_and_never_asks_anybody(monkeypatch, tmp_path):
    told, run = library(monkeypatch, "swanlab", Text=lambda text: ("text", text))
    run.mode, run.dir = "offline", tmp_path / "swanlab"
    run_facts = TrackedRun(tmp_path, "lake", "first", 0, {"seed": 7})
    kept = SwanlabStore(run_facts, login_kwargs={"api_key": "k"}, experiment_name="mine", mode="offline")
    assert told == {
        "project": "lake",
        "experiment_name": "mine",
        "mode": "offline",
        "log_dir": str(tmp_path / "swanlab"),
        "config": {"seed": 7},
        "settings": {"interactive": False, "terminal": {"proxy_type": "none"}, "api_key": "k"},
    }
    kept.write(3, {"x": 0.5}, "a text")
    kept.close()
    assert run.calls == [("log", {"x": 0.5, "samples": ("text", "a text")}, {"step": 3}), ("finish", {})]
