"""Folders of runs."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from pathlib import Path

import pytest
from messages import mentions, says

from turnwise.errors import CheckpointError, ConfigError
from turnwise.lifecycle.run_folder import RunFolder


def test_runs_that_start_in_one_second_have_their_own_folders(tmp_path):
    paths = {RunFolder.create(tmp_path, "exp").path for _ in range(5)}
    assert len(paths) == 5 and all(path.parent == tmp_path / "exp" for path in paths)


def test_the_log_ends_with_its_run(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "exp")
    folder.open_log(tmp_path / "logs")
    logger = logging.getLogger("turnwise.somewhere")
    logger.info("quiet")
    logger.warning("loud")
    folder.close()
    logger.warning("too late")
    [log] = (tmp_path / "logs").glob("exp-*.log")
    assert "quiet" in log.read_text() and "too late" not in log.read_text()
    assert "loud" in capsys.readouterr().err


def test_one_process_at_a_time_writes_into_a_folder(tmp_path):
    first = RunFolder.create(tmp_path, "exp")
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
        RunFolder.reopen(first.path)
    first.close()
    RunFolder.reopen(first.path).close()


def test_going_back_cuts_later_steps_and_a_line_that_a_kill_cut(tmp_path):
    folder = RunFolder.create(tmp_path, "exp")
    rows = [json.dumps({"step": step, "x": 1}) + "\n" for step in range(5)]
    folder.metrics.write_text("".join(rows) + '{"step": 5, "x"')
    folder.rollouts.write_text("".join(row for row in rows for _ in range(2)))
    folder.go_on(tmp_path, 3)
    folder.begin("a: 1")
    assert folder.metrics.read_text() == "".join(rows[:3])
    assert folder.rollouts.read_text() == "".join(row for row in rows[:3] for _ in range(2))
    folder.metrics.write_text("".join(rows) + '{"step": 5, "x"')
    folder.go_on(tmp_path, 9)
    folder.begin("a: 2")
    assert folder.metrics.read_text() == "".join(rows) and folder.config.read_text() == "a: 2"


DAMAGED = {
    "line": lambda file: file.write_text('{"step": 0}\nno JSON\n{"step": 1}\n'),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda file: file.symlink_to(file.name),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_log_hides_no_checkpoint(tmp_path, kind):
    folder = RunFolder.create(tmp_path, "exp")
    DAMAGED[kind](folder.metrics)
    (note,) = folder.go_on(tmp_path, 2)
    folder.begin("a: 3")
    found = "metrics.jsonl, line 2 is damaged" if kind == "line" else "metrics.jsonl isn't a file"
    assert found in note and mentions(note, "metrics.jsonl.damaged")
    assert not os.path.lexists(folder.metrics) and os.path.lexists(folder.path / "metrics.jsonl.damaged")


def test_only_a_folder_of_its_own_is_discarded(tmp_path):
    made = RunFolder.create(tmp_path, "exp")
    made.discard()
    assert not made.path.exists()
    made = RunFolder.create(tmp_path, "exp")
    made.close()
    RunFolder.reopen(made.path).discard()
    assert made.path.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir .*file"):
        RunFolder.create(tmp_path / "file", "exp")


def test_a_file_system_without_locks_is_refused_with_a_sentence(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=says("output_dir", "locked", "Function not implemented")):
        RunFolder.create(tmp_path, "exp")
    assert not list((tmp_path / "exp").iterdir())
