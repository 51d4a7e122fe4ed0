"""`--out DIR` of the commands that write a model."""

from __future__ import annotations

from pathlib import Path

from turnwise.errors import ConfigError


def require_free(out: Path) -> None:
    """Refuses to write over anything: a model folder takes the place of what has its name.

    Raises:
        ConfigError: there is something already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.resolve() == Path.cwd()):
        raise ConfigError(f"--out {out} is there already; name a new folder, or remove it first")
