"""Checkpoints: Hugging Face model folders with all that a run needs to go on from them, bit by bit."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.errors import CheckpointError
from turnwise.models.load import load_tokenizer, remove_folder, written_whole
from turnwise.protocols import Stateful, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATE_FILE = "pipeline.json"
MANIFEST_FILE = "manifest.json"


class GlobalRandomState:
    """The generators of `random` and `numpy.random`, which a user's own code may draw from; torch's are the strategy's."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds of a run: one model with its optimiser in the folder itself, those of `others` (the critic) in
    folders below it, the tokenizer, and the numbers of `parts`."""

    model: Workers
    tokenizer: PreTrainedTokenizerBase
    others: Mapping[str, Workers] = field(default_factory=dict)
    parts: Mapping[str, Stateful] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """`checkpoint-N` folders under one path, N steps done, of which the newest `max_to_keep` stay (0 = all).

    Saved every `save_steps` steps (0 = never) and after the last one. A folder appears whole or not at all, and older ones go
    only after that, so that a kill at any instant leaves the last good one.
    """

    path: Path
    save_steps: int
    max_to_keep: int
    num_steps: int
    contents: Contents

    def is_due(self, num_done: int) -> bool:
        """Whether to save after `num_done` steps."""
        return num_done == self.num_steps or (self.save_steps > 0 and num_done % self.save_steps == 0)

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that is there."""
        return next(reversed(all_checkpoints(self.path)), None)

    def save(self, num_done: int) -> Path:
        """Writes the checkpoint of `num_done` steps, unless it is there already, and prunes older ones.

        Raises:
            CheckpointError: it can't be written (a full disk); the older ones stay.
        """
        folder = self.path / f"checkpoint-{num_done}"
        if folder.exists():
            return folder
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with written_whole(folder) as partial:
                self._write(partial, num_done)
        except OSError as fault:
            raise CheckpointError(self._describe_failure(folder, fault)) from fault
        for old in all_checkpoints(self.path)[: -self.max_to_keep] if self.max_to_keep else ():
            remove_folder(old)
        return folder

    def _write(self, folder: Path, num_done: int) -> None:
        self.contents.model.call("save", folder).result()
        for name, workers in self.contents.others.items():
            workers.call("save", folder / name).result()
        self.contents.tokenizer.save_pretrained(folder)
        state = {"step": num_done, **{name: part.state_dict() for name, part in self.contents.parts.items()}}
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")
        _write_manifest(folder)

    def _describe_failure(self, folder: Path, fault: OSError) -> str:
        last = f"the last good one is {self.newest}" if self.newest else "none has been saved before"
        free = shutil.disk_usage(self.path if self.path.is_dir() else self.path.parent).free
        return (
            f"{folder} can't be written: {fault}. {free / 2**20:.0f} MiB are free there now; {last}. Free some space, or point "
            "checkpoint_config.output_dir elsewhere or lower max_ckpt_to_keep, then go on with resume_from_checkpoint=true"
        )

    def restore(self, folder: Path) -> int:
        """Brings everything to where `save` found it, and returns the number of steps that are done.

        Raises:
            CheckpointError: the folder isn't whole, or holds another run's parts (no critic, another tokenizer).
            ModelError: its model is of another architecture.
        """
        verify(folder)
        contents = self.contents
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        missing = [name for name in contents.others if not (folder / name).is_dir()]
        missing += [name for name in contents.parts if name not in state]
        if missing:
            raise CheckpointError(
                f"{folder} holds no {' and no '.join(missing)}, which this config needs: it was saved under another one. "
                "Set adv_estimator and what belongs to it as they were, or start a new run from the weights with pretrain"
            )
        _require_same_tokenizer(folder, contents.tokenizer)
        contents.model.call("load", folder).result()
        for name, workers in contents.others.items():
            workers.call("load", folder / name).result()
        for name, part in contents.parts.items():
            part.load_state_dict(state[name])
        return int(state["step"])


def all_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that are there, the oldest first."""
    numbered = [f for f in path.glob("checkpoint-*") if f.name.removeprefix("checkpoint-").isdigit()]
    return sorted(numbered, key=num_steps_of)


def newest_whole(path: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are as they were written, and what is wrong with the newer ones."""
    faults = []
    for folder in reversed(all_checkpoints(path)):
        try:
            verify(folder)
        except CheckpointError as fault:
            faults.append(f"{fault}; going back to the one before")
        else:
            return folder, faults
    return None, faults


def num_steps_of(folder: Path) -> int:
    """N of `checkpoint-N`."""
    return int(folder.name.removeprefix("checkpoint-"))


def verify(folder: Path) -> None:
    """Compares every file with the size and hash that were noted when it was written.

    Raises:
        CheckpointError: a file is missing, cut or changed.
    """
    try:
        noted = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{folder} is no whole checkpoint: {MANIFEST_FILE} can't be read ({fault})") from fault
    for name, facts in noted.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} is no whole checkpoint: {name} is missing")
        if file.stat().st_size != facts["bytes"] or _sha256(file) != facts["sha256"]:
            size = file.stat().st_size
            raise CheckpointError(
                f"{folder} is corrupted: {name} isn't as it was written (it has {size} bytes, had {facts['bytes']})"
            )


def remove_leftovers(path: Path) -> None:
    """Removes what a kill in the middle of writing or pruning left under `path`."""
    for ending in ("partial", "old", "removed"):
        for leftover in path.glob(f"checkpoint-*.{ending}"):
            shutil.rmtree(leftover)


def _write_manifest(folder: Path) -> None:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    noted = {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in files}
    (folder / MANIFEST_FILE).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_same_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    saved = load_tokenizer(folder)
    if saved.get_vocab() != tokenizer.get_vocab() or saved.chat_template != tokenizer.chat_template:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer or chat template than that of {tokenizer.name_or_path}; "
            "set pretrain to the model that the run began with"
        )
