"""Helpers of several commands: they read the config, and check the files that a command will write."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from turnwise.config.load import C, Examine, Purpose, load_config
from turnwise.errors import ConfigError
from turnwise.pipelines.interrupt import ends_at_once


def read_config(options: argparse.Namespace, kind: type[C], examine: Examine, purpose: Purpose = "train") -> C:
    """The config that a command names; its notes are printed."""
    with ends_at_once():  # plug-ins are imported
        config, notes = load_config(options.config, options.overrides, kind, options.strict, purpose, examine)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return config


def refuse_idle(policy: str, options: Iterable[tuple[str, bool, bool, str]]) -> None:
    """Refuses an option `(name, is_given, applies, what it does)` that is given but has no effect with this --policy."""
    for option, is_given, applies, what in options:
        if is_given and not applies:
            raise ConfigError(f"{option} {what}; with --policy {policy} it has no effect, leave it out")


def new_file(path: str, option: str) -> Path:
    """A file that doesn't exist yet and can be written."""
    if os.path.exists(path):
        raise ConfigError(f"{option} {path} already exists; name another file, or remove it first")
    return writable_file(path, option)


def writable_file(path: str, option: str) -> Path:
    """A file that can be written. Checking neither changes an existing file nor leaves a new one."""
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


def free_folder(path: str) -> Path:
    """The folder of `--out`, new or empty, since a model folder replaces what is in it. Missing parent folders are made."""
    out = Path(path)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.resolve() == Path.cwd()):
            raise ConfigError(f"--out {out} already exists; name a new folder, or remove it first")
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as fault:
        raise ConfigError(f"--out {out}: can't be written ({fault.strerror}); name another folder") from fault
    return out
