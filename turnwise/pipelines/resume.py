"""Finds the checkpoint to go on from, and compares the run that it was saved by with the one that goes on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from turnwise.config import AgenticConfig, Difference, SFTConfig, differences, dump_yaml
from turnwise.errors import CheckpointError
from turnwise.pipelines.checkpoints import (
    STATE_FILE,
    all_checkpoints,
    newest_whole,
    num_steps_of,
    remove_leftovers,
    verify,
)
from turnwise.pipelines.run_folder import RunFolder

Config = AgenticConfig | SFTConfig


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A whole checkpoint, the folder of the run that saved it (None where it lies somewhere else), and what is wrong with newer
    ones."""

    checkpoint: Path
    run: Path | None
    faults: list[str] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return num_steps_of(self.checkpoint)

    @property
    def is_newest(self) -> bool:
        """Whether nothing that is whole was saved after it: the run can go on in its own folder without losing anything."""
        return newest_whole(self.checkpoint.parent)[0] == self.checkpoint


def checkpoints_folder(config: Config, run: Path) -> Path:
    """Where the checkpoints of a run go: `checkpoint_config.output_dir`, in a folder of this run's name, or the run's own."""
    asked = config.checkpoint_config.output_dir
    return Path(asked) / config.exp_name / run.name if asked else run / "checkpoints"


def find_resume_point(config: Config) -> ResumePoint | None:
    """What `resume_from_checkpoint` asks for: the newest whole checkpoint of the experiment (None where there is none yet),
    or the one at a path.

    Raises:
        CheckpointError: there is no whole checkpoint at the path.
    """
    asked = config.resume_from_checkpoint
    if asked is False:
        return None
    if asked is True:
        runs = sorted(f for f in (Path(config.output_dir) / config.exp_name).glob("*") if f.is_dir())
        for run in reversed(runs):
            newest, faults = newest_whole(checkpoints_folder(config, run))
            if newest is not None:
                return ResumePoint(newest, run, faults)
        return None
    path = Path(asked)
    if (path / STATE_FILE).is_file():
        _require_whole(path)
        return ResumePoint(path, _run_of(config, path))
    for folder in (path, path / "checkpoints"):
        newest, faults = newest_whole(folder)
        if newest is not None:
            return ResumePoint(newest, _run_of(config, newest), faults)
    raise CheckpointError(
        f"resume_from_checkpoint {asked}: there is no checkpoint; give a folder checkpoint-N, a run's folder, "
        "or true for the newest of this experiment"
    )


def open_run(config: Config) -> tuple[RunFolder, list[str]]:
    """The folder that the run writes into, a new one or its own where it goes on, and what there is to say about that.

    A run that goes on from an older checkpoint than its newest gets a new folder with the measurements up to there, so that
    nothing that was done is lost.

    Raises:
        CheckpointError: there is no such checkpoint, its run is still going on, or it can't be continued with this config.
    """
    point = find_resume_point(config)
    if point is None:
        is_first = config.resume_from_checkpoint is not False
        notes = [f"resume_from_checkpoint: {config.exp_name} has no checkpoint yet; this run starts anew"] if is_first else []
        return RunFolder.create(Path(config.output_dir), config.exp_name), notes
    notes = [*point.faults, _describe_changes(config, point)]
    if point.run is not None and point.is_newest:
        folder = RunFolder.reopen(point.run)
        remove_leftovers(point.checkpoint.parent)
        _set_aside_newer(point)
    else:
        folder = RunFolder.create(Path(config.output_dir), config.exp_name)
        if point.run is not None:
            _copy_history(RunFolder(point.run), folder)
            notes.append(f"{point.run} has newer checkpoints; this run goes on in a folder of its own")
    folder.go_back_to(point.num_done)
    folder.resumed_from = point.checkpoint
    return folder, notes


def _describe_changes(config: Config, point: ResumePoint) -> str:
    """Which settings are other ones than those that the checkpoint was saved under.

    Raises:
        CheckpointError: it can't be continued with one of them.
    """
    if point.run is None:
        return f"going on from {point.checkpoint}, which lies outside its run: its settings aren't known here"
    saved = yaml.safe_load(RunFolder(point.run).config.read_text(encoding="utf-8"))
    changed = differences(saved, yaml.safe_load(dump_yaml(config)))
    refused = [difference for difference in changed if difference.reason]
    if refused:
        raise CheckpointError(
            f"{point.checkpoint} can't be continued with this config:{_listed(refused)}\n"
            "Set them as they were, or start a new run from the checkpoint's weights with pretrain"
        )
    settings = f"changed settings:{_listed(changed)}" if changed else "the same settings"
    return f"going on from {point.checkpoint}, with {settings}"


def _listed(changed: Sequence[Difference]) -> str:
    return "".join(f"\n  - {difference}" for difference in changed)


def _run_of(config: Config, checkpoint: Path) -> Path | None:
    """The run's folder is around its checkpoints, or stands under the same name in `output_dir`."""
    around = checkpoint.resolve().parent.parent
    named = Path(config.output_dir) / config.exp_name / checkpoint.resolve().parent.name
    for run in (around, named):
        if RunFolder(run).config.is_file():
            return run
    return None


def _require_whole(checkpoint: Path) -> None:
    try:
        verify(checkpoint)
    except CheckpointError as fault:
        whole, _ = newest_whole(checkpoint.parent)
        hint = f"; {whole} is whole" if whole is not None else ""
        raise CheckpointError(f"{fault}{hint}") from fault


def _set_aside_newer(point: ResumePoint) -> None:
    """A broken checkpoint isn't there for pruning to count, and stays for its owner to look at."""
    for folder in all_checkpoints(point.checkpoint.parent):
        if num_steps_of(folder) > point.num_done:
            broken = folder.with_name(folder.name + ".broken")
            shutil.rmtree(broken, ignore_errors=True)
            folder.rename(broken)


def _copy_history(old: RunFolder, new: RunFolder) -> None:
    for source, target in ((old.metrics, new.metrics), (old.rollouts, new.rollouts)):
        if source.exists():
            shutil.copyfile(source, target)
