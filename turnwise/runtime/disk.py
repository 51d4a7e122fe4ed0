"""Finds the system's error, such as a full disk, in the errors of libraries that hide it, and says what to do
about it."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk or a quota that is used up."""
_NUMBER_IN_TEXT = re.compile(r"\(os error (\d+)\)")
"""How errors of libraries in Rust, such as safetensors and tokenizers, tell the system's error number."""
_FAULTS_OF_CODE = (
    RecursionError,
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    AssertionError,
    NotImplementedError,
)
"""Errors that no disk causes."""
_TRIAL_BYTES = 2**20
_ADVICE = {
    **dict.fromkeys(NO_SPACE, "free some space, then start again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow it, or name another place"),
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP), "name another place"
    ),
}
"""Advice by errno, for file errors that a user can repair."""


class writing:  # a context, as `suppress` is
    """A context for a library's writer. If the writer fails because of the disk, raises OSError with the
    system's error number and `path`, even if the writer's own error has no number or names a file in between.
    Other errors pass as they are."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        number = system_error(error, self._path)
        if number is None:
            return
        # An error of a full disk may name a file in between.
        is_plain = isinstance(error, OSError) and error.errno is not None and error.errno not in NO_SPACE
        if not is_plain:
            raise OSError(number, os.strerror(number), str(self._path)) from error


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Gives the error of a full disk the name of `file`: an open file's `write` doesn't tell it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in NO_SPACE:
            error.filename = str(file)
        raise


def replace_file(file: Path, content: bytes) -> None:
    """Writes a file whole, or leaves the one that is there as it was: a disk may be full. Raises OSError,
    which names it."""
    partial = file.with_name(f"{file.name}.turnwise.partial")
    try:
        with naming(file):
            partial.write_bytes(content)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def system_error(error: Exception, path: Path) -> int | None:
    """The system's error number behind an error that a writer of `path` raised; None if the disk isn't at
    fault. If the error doesn't tell, a trial tells: whether the disk of `path` takes another
    `_TRIAL_BYTES`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _NUMBER_IN_TEXT.search(str(error))
    if match is not None:
        return int(match[1])
    if isinstance(error, _FAULTS_OF_CODE):
        return None
    return _trial(existing_folder(path))


def existing_folder(path: Path) -> Path:
    """The folder at or above `path` that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def free_bytes(path: Path) -> int:
    """How much is free on the disk of `path`, which needn't exist."""
    return shutil.disk_usage(existing_folder(path)).free


def require_space(path: Path, num_bytes: int, free: int | None = None) -> None:
    """Raises OSError if less than `num_bytes` are free on the disk of `path`. `free` is how much is free
    there, if that was asked before."""
    if free is None:
        free = free_bytes(path)
    if free < num_bytes:
        reason = f"{os.strerror(errno.ENOSPC)} (it takes about {num_bytes / 1e6:,.1f} MB)"
        raise OSError(errno.ENOSPC, reason, str(path))


def free_text(path: Path) -> str:
    """How much is free on the disk of `path`, as a clause of a message; empty if the system doesn't say."""
    with suppress(OSError, ValueError):
        return f"{shutil.disk_usage(existing_folder(path)).free / 1e6:,.1f} MB are free there now"
    return ""


def file_error(fault: OSError, continued: str | None = None, unnamed: str = "a file") -> str | None:
    """The sentence on a file that can't be read or written, with advice; None if it isn't an error that a
    user can repair.

    Args:
        continued: how work that a full disk ended is continued; None if it begins again.
        unnamed: what couldn't be written, if the error of a full disk doesn't name it.
    """
    if fault.errno not in _ADVICE:
        return None
    advice = _ADVICE[fault.errno]
    if fault.errno not in NO_SPACE:
        return f"{fault}; {advice}"
    if continued:
        advice += f" ({continued})"
    if fault.filename is None:
        return f"{unnamed} can't be written: {fault.strerror}; {advice}"
    name = os.fsdecode(fault.filename)
    reason = str(fault.strerror)
    free = free_text(Path(name))
    if free:
        reason += f". {free}"
    return f"{name} can't be written: {reason}; {advice}"


def _trial(folder: Path) -> int | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
    except OSError as fault:
        return fault.errno
    return None
