"""A bounded file of lines: whole lines only, also when the disk fills up in the middle of one."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from turnwise.runtime.rotating import RotatingFile, earlier_part


class NearlyFull(io.FileIO):
    """Takes the first bytes of a write, and then says so or raises."""

    def __init__(self, path: Path, raises: bool) -> None:
        super().__init__(path, "ab")
        self._raises = raises

    def write(self, line: bytes) -> int:  # type: ignore[override]
        num_written = super().write(line[:3])
        if self._raises:
            raise OSError(errno.ENOSPC, "no space left")
        return num_written


@pytest.mark.parametrize("raises", [False, True])
def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, raises: bool) -> None:
    path = tmp_path / "lines.jsonl"
    file = RotatingFile(path, 1000)
    assert file.write(b'{"a": 1}\n')
    file._file = NearlyFull(path, raises)  # type: ignore[assignment]
    with pytest.raises(OSError) as fault:
        file.write(b'{"b": 2}\n')
    assert fault.value.errno == errno.ENOSPC and path.read_bytes() == b'{"a": 1}\n'
    file._file = path.open("ab", buffering=0)
    assert file.write(b'{"c": 3}\n')
    file.close()
    assert path.read_bytes() == b'{"a": 1}\n{"c": 3}\n'


def test_the_newest_lines_stay_and_a_cut_one_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"cut')
    file = RotatingFile(path, 40)
    assert file.write(b'{"a": 1}\n') and not file.write(b"x" * 21)
    assert path.read_bytes() == b'{"cut\n{"a": 1}\n'
    assert file.write(b'{"b": 2}\n') and file.write(b'{"c": 3}\n')
    file.close()
    assert earlier_part(path).read_bytes() == b'{"cut\n{"a": 1}\n'
    assert path.read_bytes() == b'{"b": 2}\n{"c": 3}\n'
