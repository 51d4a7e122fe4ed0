"""Ctrl-C waits for the end of a step, a second one doesn't."""

from __future__ import annotations

import signal

import pytest

from turnwise.errors import CheckpointError, RolloutError
from turnwise.pipelines.interrupt import Interrupts
from turnwise.pipelines.run_folder import RunFolder
from turnwise.pipelines.session import run_to_end


def test_the_first_ctrl_c_waits_for_the_end_of_the_step(capsys):
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    assert "finishing this step" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert not interrupts.is_held and signal.getsignal(signal.SIGINT) is before


def test_the_second_one_ends_it_in_the_middle():
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.is_held
    interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is before


class Counting:
    """A pipeline of numbered steps; `during` is called in the middle of each, `between` after it."""

    def __init__(self, during=lambda step: None, between=lambda step: None, num_steps=3):
        self.interrupts = Interrupts()
        self.num_done = 0
        self.saved = []
        self.is_closed = False
        self._during, self._between, self._num_steps = during, between, num_steps

    def run(self):
        for step in range(self._num_steps):
            self.interrupts.hold()
            self._during(step)
            self.num_done = step + 1
            self.interrupts.release()
            self._between(step)

    def do_checkpoint(self):
        self.saved.append(self.num_done)
        return f"checkpoint-{self.num_done}"

    def close(self):
        self.interrupts.restore()
        self.is_closed = True


def press(signal_number, at, times=1):
    def call(step):
        for _ in range(times if step == at else 0):
            signal.raise_signal(signal_number)

    return call


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["during", "between"])
def test_an_interrupted_run_saves_its_whole_steps_and_says_where(tmp_path, capsys, signal_number, moment):
    pipeline = Counting(**{moment: press(signal_number, at=1)})
    with pytest.raises(KeyboardInterrupt):
        run_to_end(RunFolder.create(tmp_path, "exp"), lambda: pipeline)
    assert pipeline.saved == [2] and pipeline.is_closed
    assert "saved 2 steps: checkpoint-2" in capsys.readouterr().err


def test_half_a_step_is_not_saved(tmp_path, capsys):
    pipeline = Counting(during=press(signal.SIGINT, at=1, times=2))
    with pytest.raises(KeyboardInterrupt):
        run_to_end(RunFolder.create(tmp_path, "exp"), lambda: pipeline)
    assert pipeline.saved == [] and pipeline.is_closed
    assert "middle of a weight update, after 1 whole steps" in capsys.readouterr().err


def fail_with(fault, at):
    def call(step):
        if step == at:
            raise fault

    return call


def test_an_error_saves_too_but_not_after_a_checkpoint_that_failed(tmp_path):
    for fault, saved in ((RolloutError("too many failures"), [2]), (CheckpointError("disk full"), [])):
        pipeline = Counting(between=fail_with(fault, at=1))
        with pytest.raises(type(fault)):
            run_to_end(RunFolder.create(tmp_path, "exp"), lambda pipeline=pipeline: pipeline)
        assert pipeline.saved == saved and pipeline.is_closed


def test_an_error_before_the_first_step_saves_nothing(tmp_path):
    pipeline = Counting(during=fail_with(RolloutError("at once"), at=0))
    with pytest.raises(RolloutError):
        run_to_end(RunFolder.create(tmp_path, "exp"), lambda: pipeline)
    assert pipeline.saved == []


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    def build():
        raise RolloutError("no model")

    with pytest.raises(RolloutError):
        run_to_end(RunFolder.create(tmp_path, "exp"), build)
    assert not list((tmp_path / "exp").iterdir())
