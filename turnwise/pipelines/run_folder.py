"""The folder of one run: `output_dir/exp_name/<time>`, and what is always written into it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.models.load import written_whole
from turnwise.protocols import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PACKAGES = ("turnwise", "torch", "transformers", "tokenizers", "numpy", "pydantic", "hydra-core")


@dataclass(slots=True)
class RunFolder:
    """Paths of one run. `create` makes the folder; a second run of the same experiment gets another one."""

    path: Path
    handlers: list[logging.Handler] = field(default_factory=list)
    """Where this run's log goes, from `open_log` to `close_log`."""

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

    def open_log(self, folder: Path | None) -> None:
        """Sends the package's log to a readable file, in `folder` or in the run's own, and its warnings to the terminal too."""
        folder = folder or self.path
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"{self.path.parent.name}-{self.path.name}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log = logging.getLogger("turnwise")
        log.setLevel(logging.INFO)
        for handler in (file, terminal):
            log.addHandler(handler)
            self.handlers.append(handler)

    def close_log(self) -> None:
        """Ends this run's log, so that the next run of this process doesn't write into it."""
        for handler in self.handlers:
            logging.getLogger("turnwise").removeHandler(handler)
            handler.close()
        self.handlers.clear()


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """`checkpoint-N` folders under one path, of which the newest `max_to_keep` stay (0 = all).

    Saved every `save_steps` steps (0 = never) and after the last one. A folder appears whole or not at all.
    """

    path: Path
    save_steps: int
    max_to_keep: int
    num_steps: int

    def is_due(self, num_done: int) -> bool:
        """Whether to save after `num_done` steps."""
        return num_done == self.num_steps or (self.save_steps > 0 and num_done % self.save_steps == 0)

    def save(self, num_done: int, workers: Workers, tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any]) -> None:
        """Writes what the workers save, the tokenizer and `pipeline.json` with the loop's own state; prunes older folders."""
        self.path.mkdir(parents=True, exist_ok=True)
        with written_whole(self.path / f"checkpoint-{num_done}") as folder:
            workers.call("save", folder).result()
            tokenizer.save_pretrained(folder)
            (folder / "pipeline.json").write_text(json.dumps({"step": num_done, **state}, indent=2) + "\n", encoding="utf-8")
        for old in self.all()[: -self.max_to_keep] if self.max_to_keep else ():
            shutil.rmtree(old)

    def all(self) -> list[Path]:
        """The checkpoints that are there, the oldest first."""
        numbered = [f for f in self.path.glob("checkpoint-*") if f.name.removeprefix("checkpoint-").isdigit()]
        return sorted(numbered, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))


def _git_revision() -> str | None:
    """The revision of turnwise itself, None where it was installed without its repository."""
    try:
        here = Path(__file__).parent
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
