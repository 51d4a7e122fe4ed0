"""Ctrl-C waits for the end of a step, a second one doesn't."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import pytest
from messages import mentions

from turnwise.cluster.local import LocalCluster
from turnwise.errors import CheckpointError, DeadlineError, RolloutError, WorkerError
from turnwise.lifecycle.checkpoint_files import all_checkpoints
from turnwise.lifecycle.checkpoints import Checkpoints, Contents
from turnwise.lifecycle.interrupt import Interrupts, continued_by, ends_at_once, how_to_continue
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.lifecycle.session import run_to_end
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.testing.fakes import byte_tokenizer


@pytest.fixture
def pressed():
    """Interrupts that hold a first Ctrl-C back. In the end Ctrl-C does what it did before."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    interrupts.hold("finishing this step")
    signal.raise_signal(signal.SIGINT)
    yield interrupts
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_ctrl_c_waits_for_the_end_of_the_step(capsys, pressed):
    assert mentions(capsys.readouterr().err, "Ctrl-C", "this step")
    with pytest.raises(KeyboardInterrupt):
        pressed.release()


def test_the_second_one_ends_it_in_the_middle(pressed):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    pressed.restore()


class Worker:
    num_updates = 0

    def info(self):
        return self

    def save(self, folder, form="training"):
        (folder / "config.json").write_text("{}")


class Counting:
    """A pipeline of numbered steps; `during` is called in the middle of each, `between` after it, `closing`
    at the end. In step `changed` the weights have been changed before `during`."""

    def __init__(self, path, num_steps=3, changed=None, **calls):
        self.worker, self.cluster = Worker(), LocalCluster()
        role = ModelRole("role", self.cluster.spawn("role", lambda _: self.worker), BatchPlan(1, 1, 0))
        contents = Contents(role, byte_tokenizer())
        self.interrupts = Interrupts()
        self.checkpoints = Checkpoints(path / "checkpoints", 0, 0, num_steps, contents)
        self.is_closed = False
        self._changed = changed
        self._calls = calls

    def _call(self, moment, step):
        self._calls.get(moment, lambda step: None)(step)

    def run(self):
        for step in range(self.checkpoints.num_steps):
            self._call("before", step)
            self.interrupts.hold("finishing this step")
            with self.checkpoints.updating(step):
                self.worker.num_updates += step == self._changed
                self._call("during", step)
            self._call("measuring", step)
            self.interrupts.release()

    def do_checkpoint(self):
        self._call("saving", self.checkpoints.num_done)
        return self.checkpoints.save()

    def close(self):
        self.interrupts.restore()
        self.is_closed = True
        self._call("closing", 0)

    @property
    def saved(self):
        return [folder.name for folder in all_checkpoints(self.checkpoints.path)]


def press(signal_number, at, times=1):
    def call(step):
        for _ in range(times if step == at else 0):
            signal.raise_signal(signal_number)

    return call


def end(tmp_path, fault, **calls):
    """The pipeline after a run that ended with `fault`."""
    pipeline = Counting(tmp_path, **calls)
    with pytest.raises(fault):
        run_to_end(RunFolder.create(tmp_path, "exp"), lambda: pipeline)
    assert pipeline.is_closed
    return pipeline


def test_what_the_user_called_says_how_an_interrupted_run_continues():
    assert how_to_continue() == "resume_from_checkpoint=true"
    with continued_by("the same command"), continued_by("resume=true"):
        assert how_to_continue() == "the same command"
    assert how_to_continue() == "resume_from_checkpoint=true"


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("signal_number", SIGNALS)
@pytest.mark.parametrize(("moment", "at"), [("before", 2), ("during", 1), ("measuring", 1)])
def test_an_interrupted_run_saves_its_whole_steps_and_says_where(tmp_path, capsys, signal_number, moment, at):
    pipeline = end(tmp_path, KeyboardInterrupt, **{moment: press(signal_number, at=at)})
    assert pipeline.saved == ["checkpoint-2"]
    assert f"saved 2 steps: {pipeline.checkpoints.newest}" in capsys.readouterr().err


def test_where_it_is_saved_is_said_last_below_what_the_display_leaves(tmp_path, capsys):
    closing = {"closing": lambda step: print("the display", file=sys.stderr)}
    end(tmp_path, KeyboardInterrupt, before=press(signal.SIGINT, at=1), **closing)
    said = capsys.readouterr().err
    assert said.index("the display") < said.index("saved 1 step: ")


def test_a_job_in_the_background_ends_by_sigterm_too(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert end(tmp_path, KeyboardInterrupt, before=press(signal.SIGTERM, at=2)).saved == ["checkpoint-2"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class NoTerminal(io.StringIO):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def write(self, text):
        raise self.fault


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), RuntimeError("reentrant call")])
def test_the_signal_of_a_closed_terminal_lets_the_step_end(tmp_path, monkeypatch, fault):
    def hang_up(step):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", NoTerminal(fault))
            press(signal.SIGHUP, at=1)(step)

    assert end(tmp_path, KeyboardInterrupt, during=hang_up).saved == ["checkpoint-2"]


def test_half_an_update_is_not_saved(tmp_path, capsys):
    assert end(tmp_path, KeyboardInterrupt, changed=1, during=press(signal.SIGINT, at=1, times=2)).saved == []
    said = capsys.readouterr().err
    assert mentions(said, "weight update", "1 finished step") and "no checkpoint yet" in said


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt(), WorkerError("a rank has ended"), DeadlineError("waited 2 s")]
)
def test_an_update_that_has_not_reached_the_weights_costs_no_step(tmp_path, fault):
    assert end(tmp_path, type(fault), during=fail_with(fault, at=1)).saved == ["checkpoint-1"]


def test_ctrl_c_while_saving_waits_and_a_second_one_is_said(tmp_path, capsys):
    interrupted = {"before": press(signal.SIGINT, at=2)}
    assert end(tmp_path, KeyboardInterrupt, **interrupted, saving=press(signal.SIGTERM, at=2)).saved == [
        "checkpoint-2"
    ]
    assert (
        end(
            tmp_path / "b", KeyboardInterrupt, **interrupted, saving=press(signal.SIGINT, at=2, times=2)
        ).saved
        == []
    )
    assert mentions(capsys.readouterr().err, "last steps", "no checkpoint")


def fail_with(fault, at):
    def call(step):
        if step == at:
            raise fault

    return call


@pytest.mark.parametrize(
    "fault", [RolloutError("too many failures"), ValueError("a user's own code"), BrokenPipeError()]
)
@pytest.mark.parametrize(("moment", "at"), [("before", 2), ("measuring", 1)])
def test_an_error_of_any_kind_saves_too(tmp_path, fault, moment, at):
    assert end(tmp_path, type(fault), **{moment: fail_with(fault, at)}).saved == ["checkpoint-2"]


def test_after_a_checkpoint_that_failed_no_other_is_tried(tmp_path):
    assert end(tmp_path, CheckpointError, before=fail_with(CheckpointError("disk full"), at=2)).saved == []


def test_an_error_before_the_first_step_saves_nothing(tmp_path):
    assert end(tmp_path, RolloutError, before=fail_with(RolloutError("at once"), at=0)).saved == []


def test_an_error_in_closing_does_not_hide_the_first(tmp_path, caplog):
    end(
        tmp_path,
        KeyboardInterrupt,
        before=press(signal.SIGINT, at=2),
        closing=fail_with(OSError("disk"), at=0),
    )
    assert mentions(caplog.text, "failed as well", "disk")
    pipeline = Counting(tmp_path / "b", closing=fail_with(OSError("disk"), at=0))
    with pytest.raises(OSError, match="disk"):
        run_to_end(RunFolder.create(tmp_path, "exp"), lambda: pipeline)


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    def build():
        raise RolloutError("no model")

    with pytest.raises(RolloutError):
        run_to_end(RunFolder.create(tmp_path, "exp"), build)
    assert not list((tmp_path / "exp").iterdir())


def test_ctrl_c_in_an_import_ends_the_process_whatever_catches_it():
    code = (
        "import signal; from turnwise.lifecycle.interrupt import ends_at_once\n"
        "with ends_at_once():\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException: print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_behind_the_imports_ctrl_c_is_what_it_was():
    before = signal.getsignal(signal.SIGINT)
    with ends_at_once():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
