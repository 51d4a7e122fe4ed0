"""Finds the checkpoint to continue from, compares its settings with the new ones, and opens the run's
folder."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.config import AgenticConfig, Difference, SFTConfig, differences, dump_yaml
from turnwise.config.read.yaml_text import load_yaml, read_yaml
from turnwise.errors import CheckpointError, ConfigError
from turnwise.lifecycle.checkpoint_files import (
    CONFIG_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    all_checkpoints,
    number_of,
    read_state,
    remove_leftovers,
    set_aside,
    verify,
)
from turnwise.lifecycle.run_folder import RunFolder

Config = AgenticConfig | SFTConfig


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A complete checkpoint, the folder of the run that saved it (None if not found), and messages about
    damaged newer ones."""

    checkpoint: Path
    run: Path | None
    faults: list[str] = field(default_factory=list)


def checkpoints_folder(config: Config, run: Path) -> Path:
    """The folder of a run's checkpoints: below `checkpoint_config.output_dir` if that is set, else in the
    run's folder."""
    output_dir = config.checkpoint_config.output_dir
    if not output_dir:
        return run / "checkpoints"
    return Path(output_dir).absolute() / config.exp_name / run.name


def find_resume_point(config: Config) -> ResumePoint | None:
    """The checkpoint that `resume_from_checkpoint` asks for. None if the key is false, or is true and the
    experiment has no checkpoint. Raises CheckpointError if the key is a path without a checkpoint, or no
    checkpoint found is complete."""
    setting = config.resume_from_checkpoint
    if setting is False:
        return None
    if setting is True:
        return _newest_of_experiment(config)
    path = Path(setting).resolve()
    if (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file():
        _require_whole(path)
        return ResumePoint(path, _run_of(config, path))
    checkpoints = all_checkpoints(path)
    if path.is_dir():
        checkpoints.extend(_checkpoints_of(config, path))
    if not checkpoints:
        raise CheckpointError(
            f"resume_from_checkpoint {setting}: there is no checkpoint; give a folder checkpoint-N, a run's "
            "folder, or true for the newest of this experiment"
        )
    newest, faults = _newest_whole(checkpoints)
    return ResumePoint(newest, _run_of(config, newest), faults)


def _newest_of_experiment(config: Config) -> ResumePoint | None:
    """The newest complete checkpoint of all runs of the experiment; None if there is no checkpoint."""
    runs = filter(Path.is_dir, (Path(config.output_dir) / config.exp_name).glob("*"))
    run_of = {checkpoint: run for run in runs for checkpoint in _checkpoints_of(config, run)}
    if not run_of:
        return None
    newest, faults = _newest_whole(run_of)
    return ResumePoint(newest, run_of[newest], faults)


def _require_whole(checkpoint: Path) -> None:
    """Raises CheckpointError if the checkpoint isn't complete; its message names the newest sibling that
    is."""
    try:
        verify(checkpoint)
    except CheckpointError as fault:
        for sibling in reversed(all_checkpoints(checkpoint.parent)):
            if _fault(sibling) is None:
                raise CheckpointError(f"{fault}; {sibling} is complete") from fault
        raise CheckpointError(str(fault)) from fault


def check_resume(config: Config) -> None:
    """Raises CheckpointError if the run can't continue as `resume_from_checkpoint` asks."""
    point = find_resume_point(config)
    if point:
        _describe_changes(config, point)


def open_run(config: Config) -> tuple[RunFolder, list[str]]:
    """The folder that the run writes into, and notes for the log. A run that continues from its newest
    checkpoint keeps its folder. If there are newer checkpoints, or the folder can't be written, a new folder
    begins with a copy of the metrics and trajectories up to that checkpoint. Raises CheckpointError if the
    run can't be continued."""
    point = find_resume_point(config)
    if point is None:
        notes = []
        if config.resume_from_checkpoint is not False:
            notes.append(
                f"resume_from_checkpoint: {config.exp_name} has no checkpoint yet; "
                "this run starts from the beginning"
            )
        return _new_folder(config), notes
    notes = [*point.faults, _describe_changes(config, point)]
    num_done = read_state(point.checkpoint)["step"]
    folder = None
    if point.run is not None and _is_overtaken(point.checkpoint, num_done):
        notes.append(f"{point.run} has newer checkpoints; this run continues in a new folder")
    elif point.run is not None:
        try:
            folder = _reopen(config, point, point.run, num_done)
        except OSError as fault:
            why = f"{fault.filename or point.run}: {fault.strerror}"
            notes.append(f"{point.run} can't be written ({why}); this run continues in a new folder")
    if folder is None:
        folder = _new_folder(config)
        if point.run is not None:
            notes += _copy_history(RunFolder(point.run), folder)
    return folder, notes + folder.go_on(point.checkpoint, num_done)


def _reopen(config: Config, point: ResumePoint, run: Path, num_done: int) -> RunFolder:
    """Reopens the run's own folder, and sets newer checkpoints aside, which are all damaged. Raises
    CheckpointError if another process uses the folder or has just saved a checkpoint; OSError if the folder
    can't be written."""
    folder = RunFolder.reopen(run)
    with ExitStack() as on_error:
        on_error.callback(folder.close)
        if find_resume_point(config) != point:
            raise CheckpointError(
                f"{run} saved another checkpoint while this one was chosen; start again to use the newest"
            )
        for place in (run, folder.metrics, folder.rollouts, point.checkpoint.parent):
            if place.exists() and not _is_writable(place):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        remove_leftovers(point.checkpoint.parent)
        for broken in all_checkpoints(point.checkpoint.parent):
            if number_of(broken) > num_done:
                set_aside(broken)
        on_error.pop_all()
    return folder


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _new_folder(config: Config) -> RunFolder:
    """Makes a run folder, under a name that has no checkpoints yet in the folder where the config puts
    them."""
    return RunFolder.create(
        Path(config.output_dir),
        config.exp_name,
        is_free=lambda run: not all_checkpoints(checkpoints_folder(config, run)),
    )


def _checkpoints_of(config: Config, run: Path) -> Iterator[Path]:
    """The checkpoints of a run, wherever its saved config, the default or the present config puts them."""
    places = [run / "checkpoints", checkpoints_folder(config, run)]
    saved = _load_yaml(RunFolder(run).config)
    section = saved.get("checkpoint_config")
    output_dir = None
    if isinstance(section, dict):
        output_dir = section.get("output_dir")
    name = saved.get("exp_name", config.exp_name)
    if isinstance(output_dir, str) and isinstance(name, str) and output_dir and "\0" not in output_dir + name:
        places.append(Path(output_dir) / name / run.name)
    for place in dict.fromkeys(place.resolve() for place in places):
        yield from all_checkpoints(place)


def _newest_whole(checkpoints: Iterable[Path]) -> tuple[Path, list[str]]:
    """The latest complete checkpoint, and messages about later, damaged ones. Raises CheckpointError if all
    are damaged."""
    faults: list[str] = []
    for folder in sorted(checkpoints, key=_saved_at, reverse=True):
        fault = _fault(folder)
        if fault is None:
            return folder, faults
        faults.append(f"{fault}; going back to the one before")
    listed = "".join(f"\n  - {fault}" for fault in faults)
    raise CheckpointError(
        f"no checkpoint is complete:{listed}\nStart from the beginning with resume_from_checkpoint=false"
    )


def _saved_at(folder: Path) -> tuple[float, int]:
    """The modification time of a checkpoint's manifest (else of its folder, else 0), and the checkpoint's
    number."""
    for look in ((folder / MANIFEST_FILE).stat, folder.lstat):
        with suppress(OSError):
            return look().st_mtime, number_of(folder)
    return 0.0, number_of(folder)


def _fault(checkpoint: Path) -> CheckpointError | None:
    """The fault of a checkpoint, None if it is complete."""
    try:
        verify(checkpoint)
    except CheckpointError as fault:
        return fault
    return None


def _is_overtaken(checkpoint: Path, num_done: int) -> bool:
    """Whether a complete checkpoint of more steps is beside this one, or this one isn't named
    `checkpoint-N`."""
    siblings = all_checkpoints(checkpoint.parent)
    later = (sibling for sibling in siblings if number_of(sibling) > num_done)
    return checkpoint not in siblings or any(_fault(sibling) is None for sibling in later)


def _describe_changes(config: Config, point: ResumePoint) -> str:
    """A note about settings that differ from the checkpoint's. Raises CheckpointError if one of them must not
    change."""
    saved = _load_yaml(point.checkpoint / CONFIG_FILE)
    changed = differences(saved, load_yaml(dump_yaml(config), "this config"))
    refused = [difference for difference in changed if difference.is_refused]
    if refused:
        raise CheckpointError(
            f"{point.checkpoint} can't be continued with this config:{_listed(refused)}\n"
            "Set them as they were, or start a new run from the checkpoint's weights with pretrain"
        )
    settings = "the same settings"
    if changed:
        settings = f"changed settings:{_listed(changed)}"
    return f"going on from {point.checkpoint}, with {settings}"


def _listed(changed: Sequence[Difference]) -> str:
    return "".join(f"\n  - {difference}" for difference in changed)


def _load_yaml(file: Path) -> dict[str, Any]:
    """The values of a saved config; empty if the file is missing or damaged."""
    try:
        values = load_yaml(read_yaml(file), str(file))
    except ConfigError:
        return {}
    if not isinstance(values, dict):
        return {}
    return values


def _run_of(config: Config, checkpoint: Path) -> Path | None:
    """A checkpoint's run folder: its grandparent, or `output_dir/exp_name/<parent's name>`. None if neither
    has a config."""
    grandparent = checkpoint.parent.parent
    of_experiment = Path(config.output_dir) / config.exp_name / checkpoint.parent.name
    for run in (grandparent, of_experiment):
        if RunFolder(run).config.is_file():
            return run
    return None


def _copy_history(old: RunFolder, new: RunFolder) -> list[str]:
    """Copies metrics and trajectories to the new folder. Returns a note about each file that can't be
    copied."""
    notes = []
    for source, target in ((old.metrics, new.metrics), (old.rollouts, new.rollouts)):
        try:
            shutil.copyfile(source, target)
        except FileNotFoundError:
            continue
        except OSError as fault:
            why = fault.strerror or "it isn't a file"
            notes.append(f"{source} can't be copied ({why}); this run's own file begins with its first step")
    return notes
