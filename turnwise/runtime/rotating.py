"""A file of lines that is bounded in size: its older half lies in a second file."""

import errno
import os
from pathlib import Path
from typing import BinaryIO


class RotatingFile:
    """Appends lines to a file of at most `max_bytes` / 2 bytes. If the next line doesn't fit, the file is
    renamed to `NAME.1.jsonl`, which replaces an older one, and a new file begins. A resumed run appends to
    its file. Raises OSError if the file can't be opened."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes // 2
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._may_be_cut = self._size > 0  # a kill may have cut the last line

    def write(self, line: bytes) -> bool:
        """Appends a line, which ends with a newline. Returns False, and writes nothing, if it is too long for
        any file. Raises OSError if the disk doesn't take it: the file then ends with the line before."""
        if len(line) > self._max_bytes:
            return False
        if self._size + len(line) + self._may_be_cut > self._max_bytes:
            self._file.close()
            os.replace(self._path, earlier_part(self._path))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
            self._may_be_cut = False
        if self._may_be_cut:
            line = b"\n" + line
        self._append(line)
        self._may_be_cut = False
        return True

    def _append(self, line: bytes) -> None:
        num_written = 0
        try:
            num_written = self._file.write(line)
        finally:
            if num_written != len(line):  # a disk that is nearly full takes a part
                self._file.truncate(self._size)
        if num_written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


def earlier_part(path: Path) -> Path:
    """The file that holds the lines before those in `path`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")
