"""The folder of a run, `output_dir/exp_name/<time>`: its paths, lock and log, and a record of its config and
versions."""

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from turnwise import __version__
from turnwise.errors import CheckpointError, ConfigError
from turnwise.runtime.disk import naming
from turnwise.tracking.terminal import warnings_on_terminal

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pydantic", "hydra-core")


class _RunPath:
    """A class attribute that evaluates to the path of a file or folder in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type | None = None) -> Path:
        return folder.path / self._name


@dataclass(slots=True)
class RunFolder:
    """The paths in a run's folder, and its log and lock. `create` makes a new folder, `reopen` opens that of
    an earlier run. Both raise CheckpointError if another process holds the lock. `RunFolder(path)` opens
    nothing: only its paths are usable."""

    path: Path
    resumed_from: Path | None = None
    """The checkpoint that this run continues from, if any."""
    num_done: int = 0
    """Number of steps done at that checkpoint."""
    lengths: dict[Path, int] = field(default_factory=dict)
    """File of metrics or of trajectories → number of bytes of its first `num_done` steps."""
    log: ExitStack = field(default_factory=ExitStack)
    """Closes at the end of the run what is registered here, such as the log that `open_log` opens."""
    lock: TextIO | None = None
    is_new: bool = False
    """Whether this process has created the folder."""

    @classmethod
    def create(
        cls, output_dir: Path, exp_name: str, is_free: Callable[[Path], bool] = lambda path: True
    ) -> "RunFolder":
        """Makes a folder named after the time, at a path that `is_free` accepts. Raises ConfigError if it
        can't be made."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for attempt in range(1000):
            name = stamp
            if attempt:
                name = f"{stamp}-{attempt}"
            # Absolute, since an environment may change the folder.
            path = output_dir.absolute() / exp_name / name
            if not is_free(path):
                continue
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                if path.is_dir():
                    continue
                raise ConfigError(f"output_dir {output_dir}: there is a file in the way of {path}") from None
            except OSError as fault:
                raise ConfigError(f"output_dir {output_dir}: {path} can't be made: {fault}") from fault
            try:
                return cls(path, is_new=True)._locked()
            except ConfigError:
                shutil.rmtree(path)
                raise
        raise FileExistsError(f"{output_dir / exp_name} holds 1000 runs that started at {stamp}")

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Opens the folder of an earlier run, which this run continues."""
        return cls(path.absolute())._locked()

    def _locked(self) -> "RunFolder":
        lock = (self.path / "run.lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise CheckpointError(
                f"{self.path} is in use by process {owner}; wait for it, stop it, or start a new run "
                "with resume_from_checkpoint=false"
            ) from fault
        except OSError as fault:
            lock.close()
            raise ConfigError(
                f"output_dir: {self.path} can't be locked ({fault}); choose a file system with locks"
            ) from fault
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self.lock = lock
        return self

    config = _RunPath("config.yaml")
    metrics = _RunPath("metrics.jsonl")
    rollouts = _RunPath("rollouts.jsonl")
    val_rollouts = _RunPath("val_rollouts.jsonl")
    turns = _RunPath("turns.jsonl")
    traces = _RunPath("traces.jsonl")
    tensorboard = _RunPath("tensorboard")
    schedule_log = _RunPath("schedule.jsonl")
    curve = _RunPath("learning_curve.png")
    best = _RunPath("best")
    """The folder of the best model (`save_best`)."""

    @property
    def timeline(self) -> Path:
        """The file of the timeline. A resumed run writes a new file, and keeps that of the earlier steps."""
        if self.num_done:
            return self.path / f"timeline-from-{self.num_done}.json"
        return self.path / "timeline.json"

    def go_on(self, checkpoint: Path, num_done: int) -> list[str]:
        """Records the checkpoint to continue from. Renames damaged files of metrics or trajectories; returns
        notes on them."""
        self.resumed_from = checkpoint
        self.num_done = num_done
        notes = []
        for file in filter(os.path.lexists, (self.metrics, self.rollouts, self.val_rollouts)):
            try:
                self.lengths[file] = _length_of_steps(file, num_done)
            except CheckpointError as fault:
                renamed = file.replace(file.with_name(f"{file.name}.damaged"))
                notes.append(f"{fault}; it is kept as {renamed.name}, and the run continues with a new one")
        return notes

    def begin(self, config_yaml: str) -> None:
        """Writes the resolved config, the versions of packages and Python, and turnwise's git revision. Cuts
        metrics and trajectories after the first `num_done` steps, since a resumed run plays the later steps
        again."""
        _replace_text(self.config, config_yaml)
        _replace_text(self.path / "environment.json", json.dumps(_environment(), indent=2) + "\n")
        for file, length in self.lengths.items():
            os.truncate(file, length)

    def open_log(self, folder: Path | None) -> None:
        """Logs turnwise's messages and Python's warnings to a file in `folder` (default: the run's). Also
        prints warnings."""
        folder = folder or self.path
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"{self.path.parent.name}-{self.path.name}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("turnwise").setLevel(logging.INFO)
        self.log.callback(file.close)
        for name in ("turnwise", "py.warnings"):
            logging.getLogger(name).addHandler(file)
            self.log.callback(logging.getLogger(name).removeHandler, file)
        self.log.enter_context(warnings_on_terminal())

    def close(self) -> None:
        """Closes this run's log, so that the next run of this process doesn't write into it, and releases the
        lock."""
        self.log.close()
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def discard(self) -> None:
        """Closes the folder, and removes it if `create` made it, so that a failed start leaves nothing
        behind."""
        self.close()
        if self.is_new:
            shutil.rmtree(self.path)


def _length_of_steps(file: Path, num_done: int) -> int:
    """Number of bytes before the first line of step `num_done` or later, or before a last line that a killed
    process left incomplete. Raises CheckpointError if the file is damaged before that."""
    if not file.is_file():  # opening a pipe would wait
        raise CheckpointError(f"{file} isn't a file")
    length = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError, RecursionError) as fault:
                raise CheckpointError(f"{file}, line {number} is damaged ({fault})") from fault
            if step >= num_done:
                break
            length += len(line)
    return length


def _replace_text(file: Path, text: str) -> None:
    """Replaces the text of a file. Even if the process is killed, a reader finds the whole old or the whole
    new text."""
    partial = file.with_name(file.name + ".partial")
    with naming(file):
        partial.write_text(text, encoding="utf-8")
    partial.replace(file)


@cache
def _environment() -> dict[str, Any]:
    """The contents of `environment.json`. They are computed once, since the code of a process stays as it was
    loaded."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "packages": {"turnwise": __version__, **versions},
        "python": platform.python_version(),
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """The git revision of turnwise itself; None if it is installed without its repository."""
    try:
        here = Path(__file__).parent
        # An installed package may lie inside somebody else's repository.
        for command in (["git", "ls-files", "--error-unmatch", __file__], ["git", "rev-parse", "HEAD"]):
            process = subprocess.run(
                command,
                cwd=here,
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
