"""The folder of one run: `output_dir/exp_name/<time>`, and what is always written into it."""

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
from pathlib import Path
from typing import TextIO

from turnwise import __version__
from turnwise.errors import CheckpointError, ConfigError
from turnwise.tracking.terminal import warnings_on_terminal

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pydantic", "hydra-core")


class _Place:
    """A class attribute that gives the path of a file or folder in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type | None = None) -> Path:
        return folder.path / self._name


@dataclass(slots=True)
class RunFolder:
    """Paths of one run. `create` makes the folder, a new one for each run; `reopen` continues an earlier one. Only one process
    at a time writes into it."""

    path: Path
    resumed_from: Path | None = None
    """The checkpoint that this run continues from."""
    num_done: int = 0
    """Number of steps done at that checkpoint."""
    lengths: dict[Path, int] = field(default_factory=dict)
    """File of metrics or trajectories → its length in bytes after those steps."""
    log: ExitStack = field(default_factory=ExitStack)
    """Cleans up when the run ends, such as closing the log that `open_log` opened."""
    lock: TextIO | None = None
    is_new: bool = False
    """Whether this process has created the folder."""

    @classmethod
    def create(cls, output_dir: Path, exp_name: str, is_free: Callable[[Path], bool] = lambda path: True) -> "RunFolder":
        """Makes a folder named by the time, at a path for which `is_free` is true."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for attempt in range(1000):
            # Absolute, since an environment may change the folder.
            path = output_dir.absolute() / exp_name / (stamp if attempt == 0 else f"{stamp}-{attempt}")
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
            folder = cls(path, is_new=True)
            folder._take_lock()
            return folder
        raise FileExistsError(f"{output_dir / exp_name} holds 1000 runs that started at {stamp}")

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run, which this run continues."""
        folder = cls(path.absolute())
        folder._take_lock()
        return folder

    def _take_lock(self) -> None:
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
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self.lock = lock

    config = _Place("config.yaml")
    metrics = _Place("metrics.jsonl")
    rollouts = _Place("rollouts.jsonl")
    turns = _Place("turns.jsonl")
    tensorboard = _Place("tensorboard")
    schedule = _Place("schedule.jsonl")
    curve = _Place("learning_curve.png")
    best = _Place("best")
    """The best model by `save_best`."""

    @property
    def timeline(self) -> Path:
        """The file of the timeline. A resumed run writes a new one and keeps the timeline of the earlier steps."""
        return self.path / (f"timeline-from-{self.num_done}.json" if self.num_done else "timeline.json")

    def go_on(self, checkpoint: Path, num_done: int) -> list[str]:
        """Sets the checkpoint to continue from, before files are opened. Sets damaged files aside; returns notes about them."""
        self.resumed_from, self.num_done, notes = checkpoint, num_done, []
        for file in filter(os.path.lexists, (self.metrics, self.rollouts)):
            try:
                self.lengths[file] = _length_of_steps(file, num_done)
            except CheckpointError as fault:
                kept = file.replace(file.with_name(f"{file.name}.damaged"))
                notes.append(f"{fault}; it is kept as {kept.name}, and the run continues with a new one")
        return notes

    def begin(self, config_yaml: str) -> None:
        """Writes the resolved config, the package versions and the git revision. Cuts off the metrics and trajectories of all
        but the first `num_done` steps, since a resumed run plays the later steps again."""
        _replace_text(self.config, config_yaml)
        facts = {
            "packages": {"turnwise": __version__} | {name: importlib.metadata.version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "git_revision": _git_revision(),
        }
        _replace_text(self.path / "environment.json", json.dumps(facts, indent=2) + "\n")
        for file, length in self.lengths.items():
            os.truncate(file, length)

    def open_log(self, folder: Path | None) -> None:
        """Writes the package's log to a text file in `folder` (default: the run's), and its warnings to the terminal too."""
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
        """Closes this run's log, so that the next run of this process doesn't write into it, and releases the folder."""
        self.log.close()
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def discard(self) -> None:
        """Closes the folder, and removes it if this process has created it: a failed start leaves nothing behind."""
        self.close()
        if self.is_new:
            shutil.rmtree(self.path)


def _length_of_steps(file: Path, num_done: int) -> int:
    """Bytes before the first line that is of step `num_done` or later, or that is incomplete because the process was killed."""
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
    """Replaces a file's text. At every moment the file has the whole old text or the whole new one."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _git_revision() -> str | None:
    """The revision of turnwise itself, None if it was installed without its repository."""
    try:
        here = Path(__file__).parent
        # An installed package may lie inside somebody else's repository.
        for command in (["git", "ls-files", "--error-unmatch", __file__], ["git", "rev-parse", "HEAD"]):
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
