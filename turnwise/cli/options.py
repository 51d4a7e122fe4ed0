"""Functions that several commands share. They read the config, and check options and the files to be written."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from turnwise.build.play_policies import OPENAI
from turnwise.config.load import C, Examine, Purpose, load_config
from turnwise.errors import ConfigError
from turnwise.pipelines.interrupt import ends_at_once
from turnwise.replaceable import require_new_folder


def read_config(options: argparse.Namespace, kind: type[C], examine: Examine, purpose: Purpose = "train") -> C:
    """The config that the command line names. Prints its notes. `examine` yields further faults, such as those of plug-ins."""
    with ends_at_once():  # plug-ins are imported
        config, notes = load_config(options.config, options.overrides, kind, options.strict, purpose, examine)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return config


def check_policy(options: argparse.Namespace, draws: bool, who_draws: str, more: Iterable[tuple[str, bool, bool, str]]) -> None:
    """Raises ConfigError if openai:URL has no --model-name, or an option has no effect with this --policy. `draws`: whether the
    policy uses --actions; `who_draws`: who does, for the error; `more`: (option, is given, has an effect, what it does)."""
    policy, is_url = options.policy, options.policy.startswith(OPENAI)
    if is_url and options.model_name is None:
        raise ConfigError(f"{policy} serves models by name: say which with --model-name NAME")
    rows = (
        *more,
        ("--actions", options.actions is not None, draws, f"names what {who_draws} from"),
        ("--actions-file", options.actions_file is not None, draws, f"names what {who_draws} from"),
        ("--model-name", options.model_name is not None, is_url, "names a model behind openai:URL"),
    )
    for option, is_given, applies, what in rows:
        if is_given and not applies:
            raise ConfigError(f"{option} {what}; with --policy {policy} it has no effect, leave it out")


def new_file(path: str, option: str) -> Path:
    """The path of `option`. Raises ConfigError if it exists or can't be written."""
    if os.path.exists(path):
        raise ConfigError(f"{option} {path} already exists; name another file, or remove it first")
    return writable_file(path, option)


def writable_file(path: str, option: str) -> Path:
    """The path of `option`. Raises ConfigError if it can't be written. Changes no existing file, and leaves no new one."""
    file, is_new = Path(path), not os.path.exists(path)
    if not os.path.isdir(file.parent):
        raise ConfigError(f"{option} {path}: there is no folder {file.parent}; make it first")
    if not is_new and not file.is_file():  # a pipe waits for a reader
        raise ConfigError(f"{option} {path}: is a folder, pipe or device; name a file")
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as fault:
        raise ConfigError(f"{option} {path}: can't be written ({fault.strerror}); name another file") from fault
    return file


def free_folder(path: str) -> Path:
    """The folder of `--out`. Makes its parent folders. Raises ConfigError if the folder isn't empty, or can't be written."""
    out = Path(path)
    try:
        require_new_folder(out, "--out")
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as fault:
        raise ConfigError(f"--out {out}: can't be written ({fault.strerror}); name another folder") from fault
    return out
