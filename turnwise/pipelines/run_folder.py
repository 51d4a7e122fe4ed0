"""The folder of one run: `output_dir/exp_name/<time>`, and what is always written into it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from turnwise.errors import CheckpointError
from turnwise.tracking.terminal import TerminalHandler

_PACKAGES = ("turnwise", "torch", "transformers", "tokenizers", "numpy", "pydantic", "hydra-core")


@dataclass(slots=True)
class RunFolder:
    """Paths of one run. `create` makes the folder, and a second run of the same experiment gets another one; `reopen` goes on
    in it. One process at a time writes into it."""

    path: Path
    resumed_from: Path | None = None
    """The checkpoint that this run goes on from."""
    num_done: int = 0
    """Steps that were done there."""
    handlers: list[logging.Handler] = field(default_factory=list)
    """Where this run's log goes, from `open_log` to `close`."""
    lock: TextIO | None = None

    @classmethod
    def create(cls, output_dir: Path, exp_name: str) -> RunFolder:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for attempt in range(1000):
            path = output_dir / exp_name / (stamp if attempt == 0 else f"{stamp}-{attempt}")
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                continue
            folder = cls(path)
            folder._take_lock()
            return folder
        raise FileExistsError(f"{output_dir / exp_name} holds 1000 runs that started at {stamp}")

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of an earlier run, to go on in.

        Raises:
            CheckpointError: a process is still writing into it.
        """
        folder = cls(path)
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
                f"{self.path} is in use by process {owner}; wait for it, stop it, or start a run of its own "
                "with resume_from_checkpoint=false"
            ) from fault
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self.lock = lock

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def curve(self) -> Path:
        return self.path / "learning_curve.png"

    def describe(self, config_yaml: str) -> None:
        """Writes the resolved config, the package versions and the git revision."""
        self.config.write_text(config_yaml, encoding="utf-8")
        facts = {
            "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "git_revision": _git_revision(),
        }
        (self.path / "environment.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def go_back_to(self, num_done: int) -> None:
        """Cuts off what was measured and played after `num_done` steps: it will be again."""
        self.num_done = num_done
        for file in (self.metrics, self.rollouts):
            if file.exists():
                os.truncate(file, _length_of_steps(file, num_done))

    def open_log(self, folder: Path | None) -> None:
        """Sends the package's log to a readable file, in `folder` or in the run's own, and its warnings to the terminal too."""
        folder = folder or self.path
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"{self.path.parent.name}-{self.path.name}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        terminal = TerminalHandler()
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log = logging.getLogger("turnwise")
        log.setLevel(logging.INFO)
        for handler in (file, terminal):
            log.addHandler(handler)
            self.handlers.append(handler)

    def close(self) -> None:
        """Ends this run's log, so that the next run of this process doesn't write into it, and gives the folder free."""
        for handler in self.handlers:
            logging.getLogger("turnwise").removeHandler(handler)
            handler.close()
        self.handlers.clear()
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def discard(self) -> None:
        """Closes, and removes the folder where nothing was trained in it: a start that failed leaves nothing behind."""
        self.close()
        if self.resumed_from is None and not self.metrics.exists():
            shutil.rmtree(self.path)


def _length_of_steps(file: Path, num_done: int) -> int:
    """Bytes up to the first line of step `num_done` or later, or of one that was cut by a kill."""
    length = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= num_done:
                break
            length += len(line)
    return length


def _git_revision() -> str | None:
    """The revision of turnwise itself, None where it was installed without its repository."""
    try:
        here = Path(__file__).parent
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
