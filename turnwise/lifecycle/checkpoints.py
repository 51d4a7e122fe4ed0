"""Checkpoints: Hugging Face model folders with everything that a run needs to continue from them, bit for
bit."""

import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.costs.model import bytes_text
from turnwise.errors import CheckpointError, counted
from turnwise.lifecycle.checkpoint_files import (
    CONFIG_FILE,
    STATE_FILE,
    all_checkpoints,
    foreign_files,
    number_of,
    read_state,
    set_aside,
    write_manifest,
)
from turnwise.lifecycle.interrupt import Interrupts
from turnwise.models.load import load_tokenizer, remove_folder, trusted_already, written_whole
from turnwise.protocols import Pending, SavedForm, Stateful, Workers
from turnwise.runtime.replaceable import foreign_entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SEEN_FILE = ".turnwise.seen"
"""Written for a moment, to find out which nodes see it."""


class TrainedRole(Protocol):
    """What checkpoints need of a role's model (`pipelines.model_role.ModelRole`)."""

    name: str
    workers: Workers
    is_sharded: bool
    num_updates: int

    def call_full_model(self, method: str, *args: Any) -> Pending: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint contains: `model` in the folder itself, the roles of `subfolders` (the critic) by
    name, each with its optimiser; the tokenizer; the states of `parts`."""

    model: TrainedRole
    tokenizer: "PreTrainedTokenizerBase"
    subfolders: Mapping[str, TrainedRole] = field(default_factory=dict)
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    num_bytes: int = 0
    """Approximate size on the disk."""

    @property
    def roles(self) -> list[TrainedRole]:
        return [self.model, *self.subfolders.values()]


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
    has_plain_model: bool = False
    """Whether every checkpoint has a plain model folder, and not only the last one of the run. Roles that
    aren't sharded write one in any case."""
    first_step: int = field(default=0, init=False)
    """Step that this run began with: 0, or the number of steps of the checkpoint that it was restored
    from."""
    num_done: int = field(default=0, init=False)
    """Number of finished steps."""
    is_torn: bool = field(default=False, init=False)
    """Whether a weight update has begun and isn't complete."""
    _num_saved: int | None = field(default=None, init=False)
    """Steps in the run's last checkpoint, saved or restored."""
    _unprunable: set[Path] = field(default_factory=set, init=False)
    """Old checkpoints that somebody else's files are in."""

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
        if self.is_sharded:
            return False
        infos = [role.workers.call("info", route="rank0").result() for role in self.contents.roles]
        return [info.num_updates for info in infos] == self._num_updates

    def require_seen(self, wait_s: float = 10.0) -> None:
        """Raises CheckpointError if the node of a rank that saves or loads doesn't see the folder of
        checkpoints, or sees another one of this name."""
        file = self.path / _SEEN_FILE
        text = uuid.uuid4().hex
        with self._advising(file):
            self.path.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        try:
            for role in self.contents.roles:
                ranks = [role.workers.at(rank) for rank in range(role.workers.size)]
                answers = [rank.call("node_without", file, text, wait_s) for rank in ranks]
                for rank, answer in enumerate(answers):
                    node = answer.result()
                    if node:
                        raise CheckpointError(
                            f"node {node}, where rank {rank} of {role.name} is, doesn't see {self.path}, so "
                            "its part of a checkpoint would be elsewhere; point "
                            "checkpoint_config.output_dir to a folder that all nodes share"
                        )
        finally:
            file.unlink(missing_ok=True)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank of a role holds only a share of it."""
        return any(role.is_sharded for role in self.contents.roles)

    def lost_text(self) -> str:
        """A sentence on what is lost if the finished steps can't be saved."""
        newest = self.newest
        num_saved = 0 if newest is None else number_of(newest)
        num_lost = max(0, self.num_done - num_saved)
        verb = "is" if num_lost == 1 else "are"
        lost = f"{counted(num_lost, 'finished step')} {verb} lost"
        if newest is None:
            return f"{lost}, and there is no checkpoint yet"
        return f"{lost}, since {newest}, from which the run can continue"

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
                self.contents.model.call_full_model("save", partial, "model").result()
                self.contents.tokenizer.save_pretrained(partial)
                for name, text in notes.items():
                    (partial / name).write_text(text, encoding="utf-8")

    def _write(self, folder: Path) -> None:
        contents = self.contents
        has_model = self.has_plain_model or self.is_complete
        form: SavedForm = "training and model" if has_model else "training"
        contents.model.call_full_model("save", folder, form).result()
        for name, role in contents.subfolders.items():
            role.call_full_model("save", folder / name, form).result()
        contents.tokenizer.save_pretrained(folder)
        (folder / CONFIG_FILE).write_text(self.config_yaml, encoding="utf-8")
        state = json.dumps({"step": self.num_done, **self._state})
        (folder / STATE_FILE).write_text(state + "\n", encoding="utf-8")
        write_manifest(folder)

    def _prune(self) -> None:
        if not self.max_to_keep:
            return
        older = [folder for folder in all_checkpoints(self.path) if number_of(folder) <= self.num_done]
        for old in older[: -self.max_to_keep]:
            foreign = foreign_files(old)
            if foreign:
                if old not in self._unprunable:
                    logger.warning(
                        "%s stays beyond max_ckpt_to_keep, as it holds %s, which no run wrote",
                        old,
                        foreign[0],
                    )
                self._unprunable.add(old)
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
            newest = self.newest
            last = "none has been saved before"
            if newest:
                last = f"the last good one is {newest}"
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
        missing = [name for name in contents.subfolders if not (folder / name).is_dir()]
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
        for name, role in contents.subfolders.items():
            role.workers.call("load", folder / name).result()
        for name, part in contents.parts.items():
            try:
                part.load_state_dict(state[name])
            except (KeyError, TypeError, ValueError, AttributeError) as fault:
                raise CheckpointError(
                    f"{folder}: {STATE_FILE} has no usable state of {name} ({fault!r})"
                ) from fault
        self.num_done = self.first_step = state["step"]
        self._num_saved = None
        if folder.parent.resolve() == self.path.resolve():
            self._num_saved = self.num_done
        self._remember()


def _require_same_tokenizer(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    saved = load_tokenizer(folder, trusted_already(tokenizer))
    if saved.get_vocab() != tokenizer.get_vocab() or saved.chat_template != tokenizer.chat_template:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer or chat template than that of "
            f"{tokenizer.name_or_path}; set pretrain to the model that the run began with"
        )
