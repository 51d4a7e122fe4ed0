"""Whatever is damaged in a run folder: a whole checkpoint in it is found, and what was wrong with newer ones
is said."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from messages import mentions, says
from small_runs import built, run_small, small_config

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.errors import CheckpointError
from turnwise.examine.examined import examine
from turnwise.lifecycle.checkpoint_files import MANIFEST_FILE, all_checkpoints
from turnwise.lifecycle.resume import find_resume_point, open_run

NOBODY = 65534
GARBAGE = bytes(range(256)) * 4


def make_config(model, output_dir, **changes):
    own = {
        "max_steps": 2,
        "rollout_batch_size": 4,
        "track_with": ["tensorboard"],
        "train_env_manager": {"num_env_groups": 1, "group_size": 4},
    }
    return small_config(model, output_dir, **own | changes)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """A run with checkpoints of one step and of two, that nobody changes."""
    pipeline = run_small(make_config(tiny_model, tmp_path_factory.mktemp("finished")))
    assert [folder.name for folder in all_checkpoints(pipeline.folder.path / "checkpoints")] == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    return pipeline.folder.path


@pytest.fixture
def copied(finished, tiny_model, tmp_path):
    """`(config, run)`: a copy of that run, and the config that goes on with it."""
    run = tmp_path / "runs" / "letters" / finished.name
    shutil.copytree(finished, run, symlinks=True)
    return make_config(tiny_model, tmp_path / "runs", max_steps=3, resume_from_checkpoint=True), run


def resumed(config):
    """Which checkpoint a start goes on from, in which folder, and what it says."""
    folder, notes = open_run(config)
    folder.close()
    return folder.resumed_from.name, folder.path, " ".join(notes)


def forge(file, content):
    """Changes a file of a checkpoint, and its noted hash too."""
    file.write_bytes(content)
    manifest = file.with_name(MANIFEST_FILE)
    noted = json.loads(manifest.read_text())
    noted[file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(noted))


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(GARBAGE),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "one bit": lambda file: file.write_bytes(
        file.read_bytes()[:-2] + bytes([file.read_bytes()[-2] ^ 1]) + b"\n"
    ),
    "other JSON": lambda file: file.write_text("[[1]]"),
    "empty JSON": lambda file: file.write_text("{}"),
    "deep JSON": lambda file: file.write_text("[" * 100_000),
    "removed": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a dangling link": lambda file: (file.unlink(), file.symlink_to("nowhere")),
    "a circular link": lambda file: (file.unlink(), file.symlink_to(file.name)),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damaged_file_leads_to_the_checkpoint_before(copied, damage):
    config, run = copied
    newest = run / "checkpoints" / "checkpoint-2"
    whole = newest.with_name("whole")
    shutil.copytree(newest, whole)
    names = sorted(str(file.relative_to(whole)) for file in whole.rglob("*") if file.is_file())
    assert len(names) >= 6 and MANIFEST_FILE in names
    # These are read, each in its own way, the others only hashed.
    for name in names if damage == "one bit" else (MANIFEST_FILE, "pipeline.json", "trainer_state.pt"):
        for other in run.parent.glob("*/checkpoints/checkpoint-2*"):
            shutil.rmtree(other)
        shutil.copytree(whole, newest)
        DAMAGE[damage](newest / name)
        checkpoint, path, said = resumed(config)
        if name == MANIFEST_FILE and damage == "longer":
            assert checkpoint == "checkpoint-2", "a line more says nothing else"
            continue
        assert (checkpoint, path) == ("checkpoint-1", run), name
        assert "going back to the one before" in said and (
            name in said or damage in ("a pipe", "empty JSON")
        ), said


FOLDERS = {
    "a dangling link": lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
    "a circular link": lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder.name)),
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_bytes(GARBAGE)),
}


@pytest.mark.parametrize("damage", FOLDERS)
def test_a_newest_checkpoint_that_is_none_leads_to_the_one_before(copied, damage):
    config, run = copied
    FOLDERS[damage](run / "checkpoints" / "checkpoint-2")
    checkpoint, path, said = resumed(config)
    assert (checkpoint, path) == ("checkpoint-1", run)
    assert "checkpoint-2" in said and "going back to the one before" in said


class Evil:
    def __reduce__(self):
        return os.system, ("echo this was run",)


def saved_by_torch(state):
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        *(pickle.dumps({"a": 1}), pickle.dumps(Evil()), b"PK\3\4" + GARBAGE, GARBAGE, b""),
        saved_by_torch({"optimizer": Evil(), "random": {}, "cuda_rng": []}),
    ],
)
def test_a_state_that_is_no_state_leads_to_the_one_before_though_its_hash_agrees(copied, content, capfd):
    config, run = copied
    forge(run / "checkpoints" / "checkpoint-2" / "trainer_state.pt", content)
    checkpoint, _, said = resumed(config)
    assert (
        checkpoint == "checkpoint-1" and "trainer_state.pt" in said and "going back to the one before" in said
    )
    assert "weights_only" not in said and "this was run" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        *(GARBAGE, b"[" * 100_000, b"", b"- a list"),
        b"checkpoint_config: text\nexp_name: 5",
        b"checkpoint_config: {output_dir: 5}",
        b'checkpoint_config: {output_dir: "a\\0b"}',
    ],
)
def test_a_damaged_config_of_the_run_hides_nothing(copied, content):
    config, run = copied
    (run / "config.yaml").write_bytes(content)
    checkpoint, path, _ = resumed(config)
    assert (checkpoint, path) == ("checkpoint-2", run)


@pytest.mark.parametrize("name", ["config.yaml", "run.lock", "metrics.jsonl", "rollouts.jsonl"])
def test_a_folder_in_the_place_of_a_file_of_the_run_hides_no_checkpoint(copied, name):
    config, run = copied
    (run / name).unlink()
    (run / name).mkdir()
    try:
        checkpoint, _, _ = resumed(config)
    except CheckpointError as refusal:
        assert str(run / name) in str(refusal)
    else:
        assert checkpoint == "checkpoint-2"


def test_a_run_goes_on_for_real_from_the_one_before(copied):
    config, run = copied
    (run / "checkpoints" / "checkpoint-2" / "run.yaml").write_bytes(GARBAGE)
    (run / "config.yaml").write_bytes(GARBAGE)
    with built(config) as pipeline:
        assert pipeline.checkpoints.num_done == 1
        pipeline.run()
    assert pipeline.folder.path == run
    names = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    assert names == ["checkpoint-1", "checkpoint-2", "checkpoint-2.aside-1", "checkpoint-3"]


@contextmanager
def as_nobody():
    """Root may read and write whatever it likes."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def owned(finished, tiny_model):
    """The same run in a folder that anybody may enter, of a user who isn't root."""
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        run = runs / "letters" / finished.name
        shutil.copytree(finished, run)
        shutil.copytree(tiny_model, Path(place) / "model")
        os.chmod(place, 0o755)
        for path in (runs, *runs.rglob("*")):
            if os.geteuid() == 0:
                os.chown(path, NOBODY, NOBODY)
            os.chmod(path, 0o755 if path.is_dir() else 0o644)
        yield make_config(Path(place) / "model", runs, max_steps=3, resume_from_checkpoint=True), run
        for path in (runs, *runs.rglob("*")):
            os.chmod(path, 0o755)


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("checkpoints/checkpoint-2", 0o000, "checkpoint-1"),
        ("checkpoints/checkpoint-2/model.safetensors", 0o000, "checkpoint-1"),
        ("checkpoints/checkpoint-2/manifest.json", 0o000, "checkpoint-1"),
        ("checkpoints/checkpoint-2", 0o555, "checkpoint-2"),
        ("checkpoints", 0o555, "checkpoint-2"),
        ("config.yaml", 0o000, "checkpoint-2"),
        ("run.lock", 0o444, "checkpoint-2"),
        ("metrics.jsonl", 0o000, "checkpoint-2"),
        ("rollouts.jsonl", 0o444, "checkpoint-2"),
        ("", 0o555, "checkpoint-2"),
    ],
)
def test_permissions_hide_no_checkpoint(owned, name, mode, expected):
    config, run = owned
    os.chmod(run / name, mode)
    with as_nobody():
        checkpoint, path, said = resumed(config)
    assert checkpoint == expected
    if expected == "checkpoint-1":
        assert "going back to the one before" in said
    elif name in ("checkpoints", "run.lock", "metrics.jsonl", "rollouts.jsonl", ""):
        assert path != run and mentions(said, "new folder")
        assert (
            name in ("", "metrics.jsonl")
            or (path / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
        )
    else:
        assert path == run


def test_a_checkpoint_of_another_state_is_one_sentence(copied):
    """Somebody has rewritten the state, with a hash that fits."""
    config, run = copied
    for folder in all_checkpoints(run / "checkpoints"):
        state = json.loads((folder / "pipeline.json").read_text())
        forge(folder / "pipeline.json", json.dumps(state | {"rollouts": 3}).encode())
    with pytest.raises(CheckpointError, match=says("pipeline.json", "state of rollouts")):
        build_agentic(examine(config), start_run(config))


def test_a_path_to_a_damaged_one_names_a_whole_one(copied):
    config, run = copied
    newest = run / "checkpoints" / "checkpoint-2"
    (newest / "trainer_state.pt").unlink()
    with pytest.raises(CheckpointError, match=says("trainer_state.pt", "checkpoint-1")):
        find_resume_point(config.model_copy(update={"resume_from_checkpoint": str(newest)}))
