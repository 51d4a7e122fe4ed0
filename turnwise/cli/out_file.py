"""Files that a command writes at its end: an unwritable one is refused at the start."""

from __future__ import annotations

import os
from pathlib import Path

from turnwise.errors import ConfigError


def new_file(path: str, option: str) -> Path:
    """A file that doesn't exist yet and can be written.

    Raises:
        ConfigError: it does, or nothing can be written there.
    """
    if os.path.exists(path):
        raise ConfigError(f"{option} {path}: it is there already; name another file, or remove it first")
    return writable_file(path, option)


def writable_file(path: str, option: str) -> Path:
    """A file that can be written. Checking neither changes an existing file nor leaves a new one.

    Raises:
        ConfigError: there is no such folder, or the system refuses.
    """
    file, is_new = Path(path), not os.path.exists(path)
    if not os.path.isdir(file.parent):
        raise ConfigError(f"{option} {path}: there is no folder {file.parent}; make it first")
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as fault:
        raise ConfigError(f"{option} {path}: can't be written ({fault.strerror}); name another file") from fault
    return file
