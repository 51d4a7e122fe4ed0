"""Warnings that are alike are printed once and counted, whoever warns."""

from __future__ import annotations

import io
import logging
import sys
import warnings

import pytest

from turnwise.cli.main import exit_status, main
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.tracking.terminal import TerminalHandler, warnings_on_terminal

logger = logging.getLogger("turnwise.somewhere")


def said(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line]


@pytest.fixture(params=["a command", "a run"])
def ended(request, tmp_path):
    """Calls something with the log of a command, or with that of a run, until its end."""

    def in_a_run(warn):
        folder = RunFolder.create(tmp_path, "exp")
        folder.open_log(None)
        warn()
        folder.close()

    return exit_status if request.param == "a command" else in_a_run


def test_episodes_that_fail_alike_are_warned_of_once_with_a_count(ended, capsys):
    def warn():
        for episode in range(190):
            logger.warning(
                "episode %s, sibling %d, attempt %d failed: %s", f"G/{episode}", episode % 4, 1, "no secret"
            )

    ended(warn)
    first, *rest = said(capsys)
    assert first == "WARNING: episode G/0, sibling 0, attempt 1 failed: no secret"
    assert len(rest) == 3, "the 10th and the 100th say so, and the end says how many there were"
    assert rest[-1].startswith("WARNING: episode G/189") and "190" in rest[-1]


def test_other_texts_are_other_warnings_up_to_a_few(ended, capsys):
    def warn():
        for word in ("red", "green", *(f"word{'x' * n}" for n in range(50))):
            logger.warning("failed: %s", word)

    ended(warn)
    lines = said(capsys)
    assert "WARNING: failed: red" in lines and "WARNING: failed: green" in lines
    assert len(lines) < 10


def test_what_is_said_twice_is_counted_and_what_is_said_once_is_not(ended, capsys):
    def warn():
        logger.warning("once")
        for _ in range(2):
            logger.warning("twice")

    ended(warn)
    assert said(capsys) == ["WARNING: once", "WARNING: twice", "WARNING: twice (the last of 2 such warnings)"]


def test_python_s_warnings_and_other_libraries_loggers_too(ended, capsys):
    def warn():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for _ in range(20):
                warnings.warn("this is deprecated", stacklevel=1)
                logging.getLogger("some_library").warning("no kernel for this")

    ended(warn)
    lines = said(capsys)
    assert sum("this is deprecated" in line and "UserWarning" in line for line in lines) == 3
    assert sum("no kernel for this" in line for line in lines) == 3


def test_outside_a_run_nothing_is_said_that_the_process_has_said_already(ended, tmp_path, capsys):
    old, new = f"old in {tmp_path}", f"new in {tmp_path}"  # the process remembers those of other tests
    ended(lambda: logger.warning(old))
    assert said(capsys) == [f"WARNING: {old}"]
    with warnings_on_terminal(only_new=True):
        logger.warning(old)
        logger.warning(new)
    assert said(capsys) == [f"WARNING: {new}"]
    ended(lambda: logger.warning(new))
    assert said(capsys) == [f"WARNING: {new}"], "a run says all that concerns it"


def test_the_log_file_keeps_every_one(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "exp")
    folder.open_log(None)
    for number in range(20):
        logger.warning("lost %d", number)
    folder.close()
    [file] = folder.path.glob("*.log")
    assert sum("WARNING" in line for line in file.read_text().splitlines()) == 20
    assert len(said(capsys)) == 3


def test_neither_a_malformed_call_nor_a_closed_standard_error_raises(capsys, monkeypatch):
    handler = TerminalHandler()
    handler.emit(logging.makeLogRecord({"msg": "done", "args": (5,)}))
    assert "not all arguments converted" in capsys.readouterr().err
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    for _ in range(2):
        handler.emit(logging.makeLogRecord({"msg": "twice"}))
    handler.emit(logging.makeLogRecord({"msg": "done", "args": (5,)}))
    handler.close()


BROKEN = """
from turnwise.envs.base import TextEnv


class Broken(TextEnv):
    metric_reductions = {}

    def reset(self, *, seed=None):
        return "hello", {}

    def step(self, action):
        raise KeyError("no such key")
"""


def test_a_broken_environment_is_one_warning_on_the_terminal(tmp_path, tiny_model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "c.yaml").write_text(
        f"pretrain: {tiny_model}\nsequence_length: 256\nrollout_batch_size: 16\ncustom_envs:\n"
        "  B: {env_type: 'broken:Broken', max_steps: 2, max_tokens_per_step: 4}\n"
        "train_env_manager: {num_env_groups: 4, group_size: 4, max_failed_fraction: 1.0}\n"
    )
    assert main(["rollout", "c.yaml", "--out", "r.jsonl"]) == 2
    lines = said(capsys)
    assert any("max_failed_fraction" in line for line in lines)
    failures = [line for line in lines if "attempt" in line and "failed" in line]
    assert 1 <= len(failures) <= 3, "dozens of attempts fail alike"
    assert "KeyError: 'no such key'" in failures[0]
