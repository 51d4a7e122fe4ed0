"""Functions that several commands share. They read the config, and check options and the files to be
written."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from turnwise.config import AgenticConfig
from turnwise.config.read.load import Purpose
from turnwise.errors import ConfigError
from turnwise.examine.examined import Examined
from turnwise.examine.problems import object_problems
from turnwise.examine.read import Find, load_examined
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.play.policies import OPENAI
from turnwise.runtime.replaceable import require_new_folder
from turnwise.tracking.traces_file import traces_beside


def read_examined(
    options: argparse.Namespace, purpose: Purpose = "train", find: Find = object_problems
) -> Examined:
    """What the config names that the command line names. Prints the notes on the config. `find` yields the
    faults of what it names."""
    with ends_at_once():  # the user's classes are imported
        examined, notes = load_examined(
            options.config,
            options.overrides,
            options.strict,
            purpose,
            find,
        )
    print_notes(notes)
    return examined


def print_notes(notes: Iterable[str]) -> None:
    """Prints the notes on a config to standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


class PolicyOption(NamedTuple):
    """An option of a command that has an effect with some policies only."""

    flag: str
    is_set: bool
    applies: bool
    effect: str
    """The predicate of the error's first sentence."""


def check_policy(
    options: argparse.Namespace, draws: bool, who_draws: str, extra: Iterable[PolicyOption]
) -> None:
    """Raises ConfigError if openai:URL has no --model-name, or an option has no effect with this --policy.
    `draws`: whether the policy uses --actions; `who_draws`: who does, for the error; `extra`: the command's
    own options."""
    policy = options.policy
    is_url = policy.startswith(OPENAI)
    if is_url and options.model_name is None:
        raise ConfigError(f"{policy} serves models by name: say which with --model-name NAME")
    names_actions = f"names what {who_draws} from"
    policy_options = (
        *extra,
        PolicyOption("--actions", options.actions is not None, draws, names_actions),
        PolicyOption("--actions-file", options.actions_file is not None, draws, names_actions),
        PolicyOption(
            "--model-name", options.model_name is not None, is_url, "names a model behind openai:URL"
        ),
    )
    for option in policy_options:
        if option.is_set and not option.applies:
            raise ConfigError(
                f"{option.flag} {option.effect}; with --policy {policy} it has no effect, remove it"
            )


def new_file(path: str, option: str) -> Path:
    """The path of `option`. Raises ConfigError if it exists or can't be written."""
    if os.path.exists(path):
        raise ConfigError(f"{option} {path} already exists; name another file, or remove it first")
    return writable_file(path, option)


def new_traces(config: AgenticConfig, rollouts: Path | None) -> Path | None:
    """The file of the traces of those episodes that are written to `rollouts`; None without
    `trace.backend: jsonl`. Raises ConfigError if it exists or can't be written."""
    if rollouts is None or config.trace.backend != "jsonl":
        return None
    return new_file(str(traces_beside(rollouts)), "trace.backend jsonl writes to")


def writable_file(path: str, option: str) -> Path:
    """The path of `option`. Raises ConfigError if it can't be written. Changes no existing file, and leaves
    no new one."""
    file = Path(path)
    is_new = not os.path.exists(path)
    if not os.path.isdir(file.parent):
        raise ConfigError(f"{option} {path}: there is no folder {file.parent}; make it first")
    if not is_new and not file.is_file():  # a pipe waits for a reader
        raise ConfigError(f"{option} {path}: is a folder, pipe or device; name a file")
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as fault:
        raise ConfigError(
            f"{option} {path}: can't be written ({fault.strerror}); name another file"
        ) from fault
    return file


def free_folder(path: str) -> Path:
    """The folder of `--out`. Makes its parent folders. Raises ConfigError if the folder isn't empty, or can't
    be written."""
    out = Path(path)
    try:
        require_new_folder(out, "--out")
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=out.parent).cleanup()
    except OSError as fault:
        raise ConfigError(f"--out {out}: can't be written ({fault.strerror}); name another folder") from fault
    return out
