"""Checkpoints: Hugging Face model folders with everything that a run needs to continue from them, bit for
bit."""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.costs.model import bytes_text
from turnwise.errors import CheckpointError, ModelError
from turnwise.lifecycle.interrupt import Interrupts
from turnwise.models.load import load_tokenizer, remove_folder, trusted_already, written_whole
from turnwise.protocols import Pending, Stateful, Workers
from turnwise.runtime.replaceable import foreign_entries
from turnwise.training.state import TRAINER_FILE, load_trainer_state
from turnwise.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CONFIG_FILE = "run.yaml"
"""The resolved config of the run that saved the checkpoint."""
STATE_FILE = "pipeline.json"
MANIFEST_FILE = "manifest.json"


class Fingerprint:
    """A hash of the training samples' tokens. A run continues from a checkpoint only if both have the same
    hash."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(sample.token_ids.tobytes() + b"/")
        self._value = digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"sha256": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sha256"] != self._value:
            raise CheckpointError(
                "the rows of train_files have changed since the checkpoint was saved, so its position is "
                "meaningless; restore them, or start a new run from the weights with pretrain"
            )


class TrainedRole(Protocol):
    """What checkpoints need of a role's model (`pipelines.model_role.ModelRole`)."""

    workers: Workers
    is_sharded: bool
    num_updates: int

    def call_full_model(self, method: str, *args: Any) -> Pending: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint contains: `model` in the folder itself, `others` (the critic) in subfolders by name,
    each with its optimiser; the tokenizer; the states of `parts`."""

    model: TrainedRole
    tokenizer: "PreTrainedTokenizerBase"
    others: Mapping[str, TrainedRole] = field(default_factory=dict)
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    num_bytes: int = 0
    """Approximate size on the disk."""

    @property
    def roles(self) -> list[TrainedRole]:
        return [self.model, *self.others.values()]


@dataclass(eq=False)
class Checkpoints:
    """The folders `checkpoint-N` of a run, each saved after N steps. The newest `max_to_keep` are kept (0 =
    all).

    A checkpoint is due every `save_steps` steps (0 = never) and after the last step. A folder appears whole
    or not at all, and older ones are removed only afterwards: if the process is killed, the last good one is
    left.

    The states of `contents.parts` are recorded when a step is finished, so the step can be saved while the
    next one plays."""

    path: Path
    save_steps: int
    max_to_keep: int
    num_steps: int
    contents: Contents
    config_yaml: str = ""
    first_step: int = field(default=0, init=False)
    """Step that this run began with: 0, or the number of steps of the checkpoint that it was restored
    from."""
    num_done: int = field(default=0, init=False)
    """Number of finished steps."""
    is_torn: bool = field(default=False, init=False)
    """Whether a weight update has begun and isn't complete."""
    _num_saved: int | None = field(
        default=None, init=False
    )  # steps in the run's last checkpoint, saved or restored
    _kept: set[Path] = field(
        default_factory=set, init=False
    )  # old checkpoints that somebody else's files are in

    def __post_init__(self) -> None:
        self._remember()

    @contextmanager
    def updating(
        self, step: int, interrupts: Interrupts | None = None, is_last: bool = True
    ) -> Iterator[None]:
        """Wraps a part of the weight update of `step`. Only the last part changes weights: Ctrl-C doesn't
        interrupt this part, and when it has ended without an error, the step is finished."""
        if not is_last:
            yield
            return
        if interrupts:
            interrupts.hold("finishing this step")
        self.is_torn = True
        yield
        self.is_torn = False
        self.num_done = step + 1
        self._remember()

    def has_whole_weights(self) -> bool:
        """Whether rank 0 of every role holds all weights, and still those of the last finished step."""
        if any(role.is_sharded for role in self.contents.roles):
            return False
        counts = [
            role.workers.call("info", route="rank0").result().num_updates for role in self.contents.roles
        ]
        return counts == self._num_updates

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.num_done == self.num_steps

    def is_due(self, is_over: bool) -> bool:
        """Whether a checkpoint should be saved now; `is_over` says that no further step will be made."""
        is_regular = self.save_steps > 0 and self.num_done % self.save_steps == 0
        return (is_over or is_regular) and not self.is_saved

    @property
    def is_saved(self) -> bool:
        """Whether this run has a checkpoint of its finished steps, or hasn't finished any."""
        return self.num_done in (self._num_saved, 0)

    def end_here(self) -> None:
        """Ends the run after the steps done so far."""
        self.num_steps = self.num_done

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, if any."""
        return next(reversed(all_checkpoints(self.path)), None)

    def save(self) -> Path:
        """Writes a checkpoint of the finished steps, then removes the oldest checkpoints beyond
        `max_to_keep`. Does neither if this run has this checkpoint already. Returns the folder. Raises
        CheckpointError if the folder can't be written."""
        folder = self.path / f"checkpoint-{self.num_done}"
        if self._num_saved == self.num_done:
            return folder
        size = bytes_text(self.contents.num_bytes)
        logger.info("writing %s, about %s", folder, size)
        with self._advising(folder):
            self.path.mkdir(parents=True, exist_ok=True)
            if self.contents.num_bytes > shutil.disk_usage(self.path).free:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (it takes about {size})")
            if folder.exists():
                set_aside(folder)
            with written_whole(folder) as partial:
                self._write(partial)
        self._num_saved = self.num_done
        self._prune()
        return folder

    def save_model(self, folder: Path, notes: Mapping[str, str]) -> None:
        """Writes the current model and its tokenizer without the training state, and `notes` (name → text) as
        text files. The folder replaces an older one, whole or not at all. Raises CheckpointError if it can't
        be written."""
        with self._advising(folder):
            foreign = foreign_entries(folder, [*notes])
            if foreign:
                logger.warning(
                    "%s holds %s, which no run wrote; it is kept as %s", folder, foreign[0], set_aside(folder)
                )
            with written_whole(folder) as partial:
                self.contents.model.call_full_model("save", partial).result()
                (partial / TRAINER_FILE).unlink()
                self.contents.tokenizer.save_pretrained(partial)
                for name, text in notes.items():
                    (partial / name).write_text(text, encoding="utf-8")

    def _write(self, folder: Path) -> None:
        contents = self.contents
        contents.model.call_full_model("save", folder).result()
        for name, role in contents.others.items():
            role.call_full_model("save", folder / name).result()
        contents.tokenizer.save_pretrained(folder)
        (folder / CONFIG_FILE).write_text(self.config_yaml, encoding="utf-8")
        (folder / STATE_FILE).write_text(
            json.dumps({"step": self.num_done, **self._state}) + "\n", encoding="utf-8"
        )
        files = sorted(f for f in folder.rglob("*") if f.is_file())
        noted = {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in files}
        (folder / MANIFEST_FILE).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")

    def _prune(self) -> None:
        older = [folder for folder in all_checkpoints(self.path) if number_of(folder) <= self.num_done]
        for old in older[: -self.max_to_keep] if self.max_to_keep else ():
            foreign = _not_in_manifest(old)
            if foreign:
                if old not in self._kept:
                    logger.warning(
                        "%s stays beyond max_ckpt_to_keep, as it holds %s, which no run wrote",
                        old,
                        foreign[0],
                    )
                self._kept.add(old)
                continue
            try:
                remove_folder(old)
            except OSError as fault:
                logger.warning("%s can't be removed: %s", old, fault)

    def _remember(self) -> None:
        self._state = {name: part.state_dict() for name, part in self.contents.parts.items()}
        self._num_updates = [role.num_updates for role in self.contents.roles]

    @contextmanager
    def _advising(self, folder: Path) -> Iterator[None]:
        """Raises a CheckpointError with advice in place of an OSError."""
        try:
            yield
        except OSError as fault:
            last = f"the last good one is {self.newest}" if self.newest else "none has been saved before"
            place = next(place for place in (self.path, *self.path.parents) if place.is_dir())
            raise CheckpointError(
                f"{folder} can't be written: {fault}. {shutil.disk_usage(place).free / 1e6:,.1f} MB are free "
                f"there now; {last}. Free some space, or point checkpoint_config.output_dir elsewhere or "
                "lower max_ckpt_to_keep, then continue with resume_from_checkpoint=true"
            ) from fault

    def restore(self, folder: Path) -> None:
        """Restores what `save` wrote. Call `verify` first. Raises CheckpointError if the checkpoint doesn't
        fit this run."""
        contents = self.contents
        state = read_state(folder)
        missing = [name for name in contents.others if not (folder / name).is_dir()]
        missing += [name for name in contents.parts if name not in state]
        if missing:
            raise CheckpointError(
                f"{folder} holds no {' and no '.join(missing)}, which this config needs: it was saved with "
                "another config. Set adv_estimator and its related settings as they were, or start a new run "
                "from the weights with pretrain"
            )
        if state["step"] > self.num_steps:
            raise CheckpointError(
                f"{folder} has {state['step']} steps done, and this run has only {self.num_steps}: raise "
                "max_steps, or start a new run"
            )
        _require_same_tokenizer(folder, contents.tokenizer)
        contents.model.workers.call("load", folder).result()
        for name, role in contents.others.items():
            role.workers.call("load", folder / name).result()
        for name, part in contents.parts.items():
            try:
                part.load_state_dict(state[name])
            except (KeyError, TypeError, ValueError, AttributeError) as fault:
                raise CheckpointError(
                    f"{folder}: {STATE_FILE} has no usable state of {name} ({fault!r})"
                ) from fault
        self.num_done = self.first_step = state["step"]
        self._num_saved = self.num_done if folder.parent.resolve() == self.path.resolve() else None
        self._remember()


def all_checkpoints(path: Path) -> list[Path]:
    """The existing checkpoints in `path`, by ascending N."""
    return sorted(
        (f for f in path.glob("checkpoint-*") if f.name.removeprefix("checkpoint-").isdigit()), key=number_of
    )


def number_of(folder: Path) -> int:
    """The N of `checkpoint-N`."""
    return int(folder.name.removeprefix("checkpoint-"))


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of `STATE_FILE`: `step` (steps done) and the parts' states. Raises CheckpointError if it
    can't be read."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        state["step"] = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CheckpointError(
            f"{folder} isn't a complete checkpoint: {STATE_FILE} can't be read ({fault})"
        ) from fault
    return state


def verify(folder: Path) -> None:
    """Compares every file with the size and hash in `MANIFEST_FILE`. Raises CheckpointError if a file is
    missing or differs."""
    try:
        if not (folder / MANIFEST_FILE).is_file():  # opening a pipe would wait
            raise FileNotFoundError("there is no such file")
        noted = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        sizes = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in noted.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise CheckpointError(
            f"{folder} isn't a complete checkpoint: {MANIFEST_FILE} can't be read ({fault})"
        ) from fault
    for name in {STATE_FILE, CONFIG_FILE, *sizes}:
        file = folder / name
        try:
            if name not in sizes or not file.is_file():
                raise CheckpointError(f"{folder} isn't a complete checkpoint: {name} is missing")
            size, digest = sizes[name]
            is_same = file.stat().st_size == size and _sha256(file) == digest
            if is_same and file.name == TRAINER_FILE:
                load_trainer_state(file, is_mapped=True)
        except (OSError, ValueError) as fault:
            raise CheckpointError(f"{folder}: {name!r} can't be read ({fault})") from fault
        except ModelError as fault:
            raise CheckpointError(str(fault)) from fault
        if not is_same:
            raise CheckpointError(
                f"{folder} is corrupted: {name} isn't as it was written (it has {file.stat().st_size} "
                f"bytes, had {size})"
            )


def _not_in_manifest(folder: Path) -> list[str]:
    """The files of a checkpoint's folder that its manifest doesn't list, all of them if it can't be read."""
    try:
        listed = set(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        listed = set()
    present = (str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())
    return sorted(name for name in present if name not in listed and name != MANIFEST_FILE)


def set_aside(folder: Path) -> Path:
    """Frees the name of a folder: renames the folder to the first unused `NAME.aside-N` (N = 1, 2, …).
    Returns its new path."""
    number = next(n for n in count(1) if not folder.with_name(f"{folder.name}.aside-{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.aside-{number}"))


def remove_leftovers(path: Path) -> None:
    """Removes what a killed process left in `path`: checkpoints partly written, replaced by a newer one, or
    partly removed."""
    for ending in ("partial", "old", "removed"):
        for leftover in path.glob(f"checkpoint-*.{ending}"):
            shutil.rmtree(leftover)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_same_tokenizer(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    saved = load_tokenizer(folder, trusted_already(tokenizer))
    if saved.get_vocab() != tokenizer.get_vocab() or saved.chat_template != tokenizer.chat_template:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer or chat template than that of "
            f"{tokenizer.name_or_path}; set pretrain to the model that the run began with"
        )
