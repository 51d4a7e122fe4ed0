"""Folders of runs and checkpoints."""

from __future__ import annotations

import json
import logging

import pytest

from turnwise.cluster.local import LocalCluster
from turnwise.pipelines.run_folder import Checkpoints, RunFolder
from turnwise.testing.fakes import byte_tokenizer


class Worker:
    def save(self, folder):
        (folder / "weights").write_text("w")


class FullDisk:
    def save(self, folder):
        raise OSError("no space left on device")


def save(checkpoints, num_done, worker=Worker):
    checkpoints.save(num_done, LocalCluster().spawn("actor_train", worker), byte_tokenizer(), {"kl": num_done})


def test_the_newest_checkpoints_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", save_steps=2, max_to_keep=2, num_steps=11)
    assert [n for n in range(1, 12) if checkpoints.is_due(n)] == [2, 4, 6, 8, 10, 11]
    for num_done in (2, 8, 10):
        save(checkpoints, num_done)
    assert [folder.name for folder in checkpoints.all()] == ["checkpoint-8", "checkpoint-10"]
    assert json.loads((tmp_path / "c" / "checkpoint-10" / "pipeline.json").read_text()) == {"step": 10, "kl": 10}
    assert (tmp_path / "c" / "checkpoint-10" / "tokenizer.json").is_file()


def test_zero_keeps_all_and_saves_only_at_the_end(tmp_path):
    checkpoints = Checkpoints(tmp_path, save_steps=0, max_to_keep=0, num_steps=3)
    assert [n for n in range(1, 4) if checkpoints.is_due(n)] == [3]
    for num_done in (1, 2, 3):
        save(checkpoints, num_done)
    assert len(checkpoints.all()) == 3


def test_a_checkpoint_that_fails_leaves_the_older_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, save_steps=1, max_to_keep=1, num_steps=3)
    save(checkpoints, 1)
    with pytest.raises(OSError, match="no space"):
        save(checkpoints, 2, FullDisk)
    assert [folder.name for folder in checkpoints.all()] == ["checkpoint-1"]


def test_runs_that_start_in_one_second_have_their_own_folders(tmp_path):
    paths = {RunFolder.create(tmp_path, "exp").path for _ in range(5)}
    assert len(paths) == 5 and all(path.parent == tmp_path / "exp" for path in paths)


def test_the_log_ends_with_its_run(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "exp")
    folder.open_log(tmp_path / "logs")
    logger = logging.getLogger("turnwise.somewhere")
    logger.info("quiet")
    logger.warning("loud")
    folder.close_log()
    logger.warning("too late")
    [log] = (tmp_path / "logs").glob("exp-*.log")
    assert "quiet" in log.read_text() and "too late" not in log.read_text()
    assert "loud" in capsys.readouterr().err
