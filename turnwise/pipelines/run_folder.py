"""The folder of one run: `output_dir/exp_name/<time>`, and what is always written into it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("turnwise", "torch", "transformers", "tokenizers", "numpy", "pydantic", "hydra-core")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. `create` makes the folder; a second run of the same experiment gets another one."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path, exp_name: str) -> RunFolder:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for attempt in range(1000):
            path = output_dir / exp_name / (stamp if attempt == 0 else f"{stamp}-{attempt}")
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                continue
            return cls(path)
        raise FileExistsError(f"{output_dir / exp_name} holds 1000 runs that started at {stamp}")

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

    def log_to_file(self, folder: Path | None) -> logging.Handler:
        """Sends the package's log to a readable file of this run, in `folder` or in the run's own."""
        folder = folder or self.path
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"{self.path.parent.name}-{self.path.name}.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger("turnwise")
        root.setLevel(logging.INFO)
        root.addHandler(handler)
        return handler


class CheckpointFolder:
    """`checkpoint-N` folders under one path, of which the newest `max_to_keep` stay (0 = all)."""

    def __init__(self, path: Path, max_to_keep: int) -> None:
        self.path = path
        self._max_to_keep = max_to_keep

    def next(self, step: int) -> Path:
        """The folder for a checkpoint after `step` steps."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path / f"checkpoint-{step}"

    def prune(self) -> None:
        """Removes all but the newest checkpoints."""
        folders = sorted(self.path.glob("checkpoint-*"), key=lambda f: int(f.name.removeprefix("checkpoint-")))
        for folder in folders[: -self._max_to_keep] if self._max_to_keep else ():
            shutil.rmtree(folder)


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
