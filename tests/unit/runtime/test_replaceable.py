"""What may be replaced: a model that turnwise wrote, and nothing else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.runtime.replaceable import (
    foreign_entries,
    point_link,
    require_new_folder,
    require_replaceable,
    why_files_kept,
    why_kept,
    write_new_or_same,
)

CONFIG = json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
MODEL = {
    "config.json": CONFIG,
    "model.safetensors": "x",
    "tokenizer.json": "{}",
    "generation_config.json": "{}",
}
SHARDED = {
    "config.json": CONFIG,
    "model-00001-of-00002.safetensors": "x",
    "model.safetensors.index.json": "{}",
}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "x", "base_fingerprint.txt": "1"}
OWN_CODE = {
    **MODEL,
    "config.json": CONFIG[:-1] + ', "auto_map": {"AutoConfig": "configuration_x.X"}}',
    "configuration_x.py": "",
}


def folder_with(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("files", [MODEL, SHARDED, ADAPTER], ids=["model", "sharded", "adapter"])
def test_a_model_of_ours_may_be_replaced(files, tmp_path):
    assert why_kept(folder_with(tmp_path / "model", files)) == ""


def test_a_new_and_an_empty_folder_may_be_used(tmp_path):
    assert why_kept(tmp_path / "new") == ""
    (tmp_path / "empty").mkdir()
    assert why_kept(tmp_path / "empty") == ""


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({**MODEL, "notes.txt": "mine"}, "notes.txt"),
        ({**MODEL, "sub/data.csv": "1"}, "sub"),
        ({**MODEL, ".git/HEAD": "ref"}, ".git"),
        ({**MODEL, "model_backup.safetensors": "x"}, "model_backup.safetensors"),
        ({**MODEL, "train.py": ""}, "train.py"),
        (OWN_CODE, "configuration_x.py"),
        ({**MODEL, "tokenizer.json.orig": ""}, "tokenizer.json.orig"),
        ({"config.json": '{"name": "my project"}'}, "config.json"),
        ({"config.json": '{"name": "my project"}', "model.safetensors": "x"}, "config.json"),
        ({"config.json": "[1]", "model.safetensors": "x"}, "config.json"),
        ({"config.json": CONFIG}, "no weights"),
        ({"vocab.txt": "my words"}, "vocab.txt"),
        ({**MODEL, "trainer_state.pt": "x"}, "checkpoint"),
        ({**MODEL, "pipeline.json": "{}"}, "checkpoint"),
        ({**{f"{n}.txt": "" for n in range(9)}}, "6 others"),
    ],
)
def test_what_holds_anything_else_stays(files, word, tmp_path):
    folder = folder_with(tmp_path / "it", files)
    with pytest.raises(ConfigError, match=r"save: .*already exists and isn't replaced") as refused:
        require_replaceable(folder, "save")
    assert word in str(refused.value)


def test_links_files_pipes_and_the_working_folder_stay(tmp_path, monkeypatch):
    model = folder_with(tmp_path / "model", MODEL)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "link" in why_kept(tmp_path / "link") and "link" in why_kept(tmp_path / "dangling")
    assert "file" in why_kept(model / "config.json")
    os.mkfifo(model / "vocab.json")
    assert "vocab.json" in why_kept(model)
    (model / "vocab.json").unlink()
    monkeypatch.chdir(model)
    assert "folder that you are in" in why_kept(Path("."))


def test_what_a_run_needs_stays(tmp_path):
    run = folder_with(tmp_path / "run", {"run.lock": "1"})
    for name in ("best", "base_model", "base_critic"):
        assert "belongs to the run" in why_kept(folder_with(run / name, MODEL))
    assert why_kept(folder_with(run / "exported", MODEL)) == ""
    start = folder_with(tmp_path / "start", MODEL)
    (tmp_path / "other_name").symlink_to(start)
    for name in (start, str(start), tmp_path / "other_name"):
        assert "starts from" in why_kept(start, [name])
    assert why_kept(start, [tmp_path / "nowhere", "Qwen/Qwen3-0.6B"]) == ""


def test_files_of_a_model_among_others(tmp_path):
    for files, is_kept in (
        (MODEL, False),
        ({}, False),
        ({"config.json": "{}"}, True),
        ({**MODEL, "manifest.json": "{}"}, True),
    ):
        folder = folder_with(
            tmp_path / str(len(list(tmp_path.iterdir()))), {"notes.txt": "mine", "run/log": "", **files}
        )
        assert bool(why_files_kept(folder)) == is_kept, files
    assert foreign_entries(
        folder_with(tmp_path / "best", {**MODEL, "best.json": "{}", "mine.txt": ""}), ["best.json"]
    ) == ["mine.txt"]


def test_a_new_folder_is_asked_for(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for fine in ("new", "empty"):
        require_new_folder(tmp_path / fine, "--out")
    for taken in (".", "link"):
        with pytest.raises(ConfigError, match=r"--out .* already exists"):
            require_new_folder(tmp_path / taken, "--out")


def test_where_a_disk_is_mounted_no_model_is_put():
    mounted = Path("/proc")
    assert "mounted" in why_kept(mounted)
    with pytest.raises(ConfigError, match=r"--out /proc: .*mounted.* such as /proc/model"):
        require_new_folder(mounted, "--out")


def test_a_runs_best_model_may_have_code_of_its_own(tmp_path):
    assert foreign_entries(folder_with(tmp_path / "best", OWN_CODE)) == []


def test_a_file_of_rows_is_written_once_and_other_contents_stay(tmp_path):
    file = tmp_path / "new" / "train.jsonl"
    for _ in range(2):
        write_new_or_same(file, "a\n", "--out")
    with pytest.raises(ConfigError, match=r"train.jsonl already exists with other contents.*another --out"):
        write_new_or_same(file, "b\n", "--out")
    assert file.read_text() == "a\n" and [path.name for path in file.parent.iterdir()] == ["train.jsonl"]
    with pytest.raises(ConfigError, match="isn't replaced"):
        write_new_or_same(file.parent, "a\n", "--out")


def test_only_a_link_is_pointed_elsewhere(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert point_link(tmp_path / "sft_model", tmp_path / name, "--out").resolve() == tmp_path / name
    (tmp_path / "mine").write_text("my own")
    for own in (tmp_path / "mine", tmp_path / "first"):
        with pytest.raises(ConfigError, match=r"is no link.*another --out"):
            point_link(own, tmp_path / "second", "--out")
    assert (tmp_path / "mine").read_text() == "my own"


def test_no_example_replaces_files_by_itself():
    direct = re.compile(
        r"\.write_(text|bytes)\(|\.unlink\(|\.symlink_to\(|open\(.*[\"']w|write_table\([^,]*, path"
    )
    files = sorted((Path(__file__).parents[2] / "examples").rglob("*.py"))
    assert len(files) > 8
    assert not [f"{file.name}: {found[0]}" for file in files for found in direct.finditer(file.read_text())]
