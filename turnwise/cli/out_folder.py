"""`--out DIR` of the commands that write a model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from turnwise.errors import ConfigError


def require_free(out: Path) -> None:
    """Refuses to write over anything, since a model folder takes the place of what has its name, and where nothing can be
    written. Folders above it are made.

    Raises:
        ConfigError: there is something already, or the system refuses.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.resolve() == Path.cwd()):
            raise ConfigError(f"--out {out} is there already; name a new folder, or remove it first")
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as fault:
        raise ConfigError(f"--out {out}: can't be written ({fault.strerror}); name another folder") from fault
