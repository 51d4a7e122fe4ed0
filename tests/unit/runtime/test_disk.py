"""The system's error is found in the errors of libraries that hide it, and in no others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from turnwise.runtime.disk import existing_folder, naming, replace_file, system_error, writing
from turnwise.tracking.jsonl import JsonlTracker

RUST = "I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (SafetensorError(RUST), errno.ENOSPC),
        (Exception("Disk quota exceeded (os error 122)"), errno.EDQUOT),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
        (OSError("encoder error -2 when writing image file"), None),
        (RuntimeError("PytorchStreamWriter failed"), None),
        (RecursionError("maximum recursion depth exceeded"), None),
        (TypeError("no tensor"), None),
    ],
)
def test_the_number_behind_an_error(error, number, tmp_path):
    assert system_error(error, tmp_path / "new" / "file") == number


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_takes_nothing_tells_what_the_error_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: Path("/dev/full").open("wb", buffering=0))  # noqa: SIM115
    assert system_error(RuntimeError("PytorchStreamWriter failed"), tmp_path) == errno.ENOSPC
    assert system_error(RecursionError("maximum recursion depth exceeded"), tmp_path) is None


def test_writers_errors(tmp_path):
    target = tmp_path / "model"
    partial = str(tmp_path / "model.turnwise.partial")
    for error in (SafetensorError(RUST), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), partial)):
        with pytest.raises(OSError, match="No space left") as raised, writing(target):
            raise error
        assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(target)
    for other in (
        RecursionError(),
        KeyError("x"),
        PermissionError(errno.EACCES, "no", "x"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(other)) as raised, writing(target):
            raise other
        assert raised.value is other
    assert existing_folder(target / "deeper") == tmp_path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_files_name(tmp_path):
    link = tmp_path / "metrics.jsonl"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        JsonlTracker(link).log(0, {"a": 1.0})
    assert raised.value.filename == str(link)
    other = PermissionError(errno.EACCES, "no")
    with pytest.raises(PermissionError) as raised, naming(link):
        raise other
    assert raised.value.filename is None


def test_a_file_stays_where_its_replacement_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "score.json"
    replace_file(file, b"old")

    def full(path, content):
        path.open("wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as raised:
        replace_file(file, b"new")
    assert raised.value.filename == str(file) and [path.name for path in tmp_path.iterdir()] == ["score.json"]
    assert file.read_text() == "old"
