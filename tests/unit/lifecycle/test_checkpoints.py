"""Checkpoints appear whole, stay whole, and a broken one is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from messages import says
from small_runs import small_yaml

from turnwise.cli.main import main
from turnwise.cluster.local import LocalCluster
from turnwise.errors import CheckpointError
from turnwise.lifecycle.checkpoint_files import all_checkpoints, remove_leftovers, verify
from turnwise.lifecycle.checkpoints import Checkpoints, Contents
from turnwise.models.make import make_model
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.testing.fakes import byte_tokenizer


class Worker:
    """Saves a word as the weights of its model folder."""

    def __init__(self, value="w"):
        self.value = value

    def save(self, folder, form="training"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        (folder / "weights").write_text(self.value)

    def load(self, folder):
        self.value = (folder / "weights").read_text()

    def node_without(self, file, text, wait_s):
        return "" if self.sees(file, text) else "node7"

    def sees(self, file, text):
        return file.read_text() == text


class Blind(Worker):
    def sees(self, file, text):
        return False


class FullDisk:
    def save(self, folder, form="training"):
        (folder / "weights").write_text("half of it")
        raise OSError(28, "No space left on device")


class Number:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpoints(path, worker=None, *, parts=None, subfolders=None, tokenizer=None, num_bytes=0, **limits):
    def role(it):
        return ModelRole("role", LocalCluster().spawn("role", lambda _: it), BatchPlan(1, 1, 0))

    contents = Contents(
        role(worker or Worker()),
        tokenizer or byte_tokenizer(),
        subfolders={name: role(it) for name, it in (subfolders or {}).items()},
        parts=parts or {},
        num_bytes=num_bytes,
    )
    return Checkpoints(
        path, **{"save_steps": 1, "max_to_keep": 0, "num_steps": 9} | limits, contents=contents
    )


def save(saver, num_done):
    with saver.updating(num_done - 1):
        pass
    return saver.save()


def due_after(saver):
    found = []
    for step in range(saver.num_steps):
        with saver.updating(step):
            pass
        found += [saver.num_done] if saver.is_due(saver.is_complete) else []
    return found


def names(path):
    return [folder.name for folder in all_checkpoints(path)]


def test_the_newest_checkpoints_stay(tmp_path):
    saver = checkpoints(tmp_path / "c", save_steps=2, max_to_keep=2, num_steps=11)
    assert due_after(saver) == [2, 4, 6, 8, 10, 11]
    for num_done in (2, 8, 10):
        save(saver, num_done)
    assert names(tmp_path / "c") == ["checkpoint-8", "checkpoint-10"]
    assert saver.newest == tmp_path / "c" / "checkpoint-10"
    assert {f.name for f in (tmp_path / "c").iterdir()} == {"checkpoint-8", "checkpoint-10"}


def test_a_folder_that_a_node_does_not_see_is_refused(tmp_path):
    checkpoints(tmp_path / "seen").require_seen()
    with pytest.raises(CheckpointError, match=says("node7", "rank 0 of role", "output_dir")):
        checkpoints(tmp_path / "unseen", subfolders={"critic": Blind()}).require_seen()
    assert not [*(tmp_path / "seen").iterdir(), *(tmp_path / "unseen").iterdir()]


def test_says_how_many_steps_are_lost(tmp_path):
    saver = checkpoints(tmp_path)
    saver.num_done = 1
    assert "1 finished step is lost" in saver.lost_text() and "no checkpoint yet" in saver.lost_text()
    save(saver, 2)
    saver.num_done = 5
    assert "3 finished steps are lost" in saver.lost_text() and "checkpoint-2" in saver.lost_text()


def test_the_last_checkpoint_asks_for_a_plain_model(tmp_path):
    class Forms(Worker):
        def save(self, folder, form="training"):
            super().save(folder)
            forms.append(form)

    forms = []
    saver = checkpoints(tmp_path, Forms(), num_steps=3)
    for num_done in (1, 3):
        save(saver, num_done)
    saver.has_plain_model = True
    save(saver, 2)
    saver.save_model(tmp_path / "best", {})
    assert forms == ["training", "training and model", "training and model", "model"]


def test_zero_keeps_all_and_saves_only_at_the_end(tmp_path):
    saver = checkpoints(tmp_path, save_steps=0, max_to_keep=0, num_steps=3)
    assert due_after(saver) == [3]
    for num_done in (1, 2, 3):
        save(saver, num_done)
    assert len(names(tmp_path)) == 3


def test_what_was_saved_comes_back(tmp_path):
    actor, critic, beta = Worker("actor"), Worker("critic"), Number(0.25)
    saver = checkpoints(tmp_path, actor, subfolders={"critic": critic}, parts={"kl_ctrl": beta})
    folder = save(saver, 3)
    assert (folder / "critic" / "weights").read_text() == "critic"
    actor.value = critic.value = beta.value = "changed"
    saver.restore(folder)
    assert saver.num_done == 3
    assert (actor.value, critic.value, beta.value) == ("actor", "critic", 0.25)


def test_a_full_disk_leaves_the_older_ones_and_no_half_one(tmp_path):
    save(checkpoints(tmp_path), 1)
    with pytest.raises(
        CheckpointError, match=says("No space left", "checkpoint-1", "resume_from_checkpoint")
    ):
        save(checkpoints(tmp_path, FullDisk(), max_to_keep=1), 2)
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint-1"]
    verify(tmp_path / "checkpoint-1")


def test_a_step_in_the_middle_changes_nothing_of_what_is_saved(tmp_path):
    beta = Number(1)
    saver = checkpoints(tmp_path, parts={"kl_ctrl": beta})
    with saver.updating(0):
        beta.value = 2
    assert not saver.is_torn
    beta.value = 3
    saver.restore(saver.save())
    assert beta.value == 2, "as it was when the step became whole"
    with pytest.raises(RuntimeError), saver.updating(1):
        raise RuntimeError
    assert saver.is_torn and saver.num_done == 1


def test_what_another_run_left_under_the_name_is_set_aside(tmp_path):
    save(checkpoints(tmp_path, Worker("theirs")), 2)
    folder = save(checkpoints(tmp_path, Worker("ours")), 2)
    assert (folder / "weights").read_text() == "ours"
    assert (tmp_path / "checkpoint-2.aside-1" / "weights").read_text() == "theirs"
    saver = checkpoints(tmp_path, Worker("goes on"))
    saver.restore(folder)
    assert saver.save() == folder and (folder / "weights").read_text() == "ours", "it is there already"


def other_tokenizer():
    other = byte_tokenizer()
    other.chat_template += " "
    return other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_steps": 3}, says("5 steps", "only 3")),
        (
            {"subfolders": {"critic": Worker()}, "parts": {"running": Number(1)}},
            says("critic", "running"),
        ),
        ({"tokenizer": other_tokenizer()}, says("tokenizer", "chat template")),
    ],
    ids=["steps", "parts", "tokenizer"],
)
def test_a_checkpoint_that_does_not_fit_the_run_is_refused(tmp_path, changes, said):
    folder = save(checkpoints(tmp_path), 5)
    with pytest.raises(CheckpointError, match=said):
        checkpoints(tmp_path, **changes).restore(folder)


def test_leftovers_of_a_kill_are_no_checkpoints(tmp_path):
    save(checkpoints(tmp_path), 1)
    for name in ("checkpoint-2.partial", "checkpoint-0.removed"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == ["checkpoint-1"]
    remove_leftovers(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_disk_that_can_not_hold_it_is_refused_before_anything_is_written(tmp_path):
    saver = checkpoints(tmp_path / "c", num_bytes=10**18)
    with pytest.raises(CheckpointError, match=says("No space left", "1000000000.0 GB", "max_ckpt_to_keep")):
        save(saver, 1)
    assert not list((tmp_path / "c").iterdir())


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 32, "lora_target": "all"}])
def test_its_size_is_said_before_it_is_written(tmp_path, capsys, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    make_model("tiny", Path("model"), ["<answer>Left</answer> 0 1 2 3 " * 20])
    Path("toy.yaml").write_text(small_yaml("model", max_steps=1, actor_train={"model_args": changes}))
    sizes = []
    for verb in ("config", "train"):
        assert main([verb, "toy.yaml"]) == 0
        sizes.append(size_in(capsys.readouterr().out))
    [folder] = Path("runs").glob("*/*/checkpoints/checkpoint-1")
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".safetensors", ".pt"))
    assert sizes == pytest.approx([written] * 2, rel=0.05, abs=100_000)


def size_in(text):
    """The number of bytes in a row of the table."""
    [number] = re.findall(r"^checkpoints +.*about ([\d.]+) MB each", text, re.MULTILINE)
    return float(number) * 1e6
