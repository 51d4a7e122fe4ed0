"""Finds what `turnwise view` shows: runs or files of episodes, their tokenizer, metrics and settings."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.cli.env_target import NO_MODEL
from turnwise.cli.view_spans import TraceSpans
from turnwise.config import AgenticConfig, load_config
from turnwise.config.read.yaml_text import load_yaml, read_yaml
from turnwise.config.show.dump import leaves
from turnwise.errors import ConfigError, DataError, ModelError, counted
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.model_files.folder import folder_here
from turnwise.models.token_decoder import TokenDecoder, has_tokens
from turnwise.report.view.rollouts_file import RolloutsFile
from turnwise.report.view.source import SHOWN_BYTES, Episodes, RunSource, metric_columns
from turnwise.report.view.timeline_data import timeline_data
from turnwise.report.view.token_texts import TokenTexts
from turnwise.tracking.jsonl import read_metrics, read_sentences
from turnwise.tracking.traces_file import traces_beside

_RUN_FILES = ("rollouts.jsonl", "metrics.jsonl")
_MAX_RUNS = 8
_TURNS = b'{"episode":'
"""How a line of `turns.jsonl` begins."""


@dataclass(slots=True)
class ViewedRun:
    """A run or a file of episodes, and what `turnwise view` says of it on the terminal."""

    source: RunSource
    default_out: Path
    notes: list[str] = field(default_factory=list)
    folder: RunFolder | None = None

    def left_out(self) -> list[str]:
        """Sentences on what the pages don't show."""
        sentences = []
        for episodes in self.source.episodes:
            name = episodes.file.path.name
            if episodes.every > 1:
                sentences.append(
                    f"{name} has more than {SHOWN_BYTES / 1e9:g} GB: every {episodes.every}th step is shown; "
                    "name others with --steps"
                )
            num_damaged = episodes.file.num_damaged
            num_damaged += sum(summary.get("damaged", 0) for summary in episodes.summaries.values())
            if num_damaged:
                sentences.append(f"{name}: {counted(num_damaged, 'line')} can't be read and are left out")
        return sentences


def find_runs(
    paths: Sequence[str], tokenizer: str | None, steps: Sequence[str] | None, waits: bool = False
) -> list[ViewedRun]:
    """The runs at these paths. `waits`: whether a run may be shown that has no step yet. Raises DataError if
    there is nothing to show."""
    if len(paths) > _MAX_RUNS:
        raise ConfigError(f"view shows at most {_MAX_RUNS} runs side by side; got {len(paths)}")
    texts = TokenTexts(TokenDecoder(Path(tokenizer))) if tokenizer else None
    runs = [_found(path, texts) for path in paths]
    for viewed in runs:
        if steps is not None:
            _choose(viewed, steps)
        if not waits and not any(episodes.file.steps for episodes in viewed.source.episodes):
            files = " and ".join(str(episodes.file.path) for episodes in viewed.source.episodes)
            raise DataError(f"{files}: no step has ended there yet; wait, or watch it with --port 8000")
    return runs


def _found(word: str, texts: TokenTexts | None) -> ViewedRun:
    path = Path(word)
    if path.is_dir():
        return _run_of(path, texts)
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder; name a run folder or a rollouts.jsonl")
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; name a run folder or a rollouts.jsonl")
    file = _scanned(path)
    if not file.steps and path.stat().st_size:
        raise DataError(f"{path} holds no episodes{_what_it_is(path)}; name the rollouts.jsonl of a run")
    run = path.parent
    is_of_run = path.name in ("rollouts.jsonl", "val_rollouts.jsonl") and (run / "config.yaml").is_file()
    source = RunSource(path.name, str(path.resolve()), [Episodes("file", file, 1)], texts)
    viewed = ViewedRun(source, path.with_name(f"{path.stem}-view"))
    if is_of_run:
        viewed.folder = RunFolder(run)
        source.episodes[0].kind = "val" if path.name.startswith("val_") else "train"
        source.episodes[0].first_step = 0 if path.name.startswith("val_") else 1
        _read_run(viewed, run)
        source.spans = TraceSpans(viewed.folder.traces).of_step
    elif traces_beside(path).is_file():
        source.spans = TraceSpans(traces_beside(path)).of_step
    _find_texts(viewed, run if is_of_run else None)
    return viewed


def _what_it_is(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(64).lstrip().startswith(_TURNS):
            return ", but turns of a journal, which `turnwise rollout --replay` reads"
    return ""


def _scanned(path: Path) -> RolloutsFile:
    file = RolloutsFile(path)
    file.scan()
    return file


def _run_of(path: Path, texts: TokenTexts | None) -> ViewedRun:
    """The run in a folder, or the newest one of an experiment's folder."""
    notes = []
    if not any((path / name).is_file() for name in _RUN_FILES):
        runs = sorted(file.parent for file in path.glob("*/rollouts.jsonl"))
        if not runs:
            raise DataError(
                f"{path} isn't a run folder, as it holds no rollouts.jsonl; a run's is "
                "output_dir/exp_name/<time>"
            )
        path = runs[-1]
        if len(runs) > 1:
            notes.append(f"the newest of {len(runs)} runs: {path}")
    folder = RunFolder(path)
    if not folder.rollouts.is_file():
        raise DataError(
            f"{path} holds no rollouts.jsonl, so there are no episodes to show; `turnwise compare` shows its "
            "metrics"
        )
    episodes = [Episodes("train", _scanned(folder.rollouts), 1)]
    if folder.val_rollouts.is_file():
        episodes.append(Episodes("val", _scanned(folder.val_rollouts), 0))
    resolved = path.resolve()
    name = f"{resolved.parent.name}/{resolved.name}"
    viewed = ViewedRun(
        RunSource(name, str(resolved), episodes, texts),
        path / "view",
        notes,
        folder,
    )
    _read_run(viewed, path)
    _find_texts(viewed, path)
    viewed.source.spans = TraceSpans(folder.traces).of_step
    return viewed


def _find_timeline(viewed: ViewedRun, path: Path) -> None:
    timelines = sorted(path.glob("timeline*.json"), key=os.path.getmtime)
    if timelines:
        try:
            viewed.source.timeline = timeline_data(timelines[-1])
        except DataError as fault:
            viewed.notes.append(str(fault))


def _find_texts(viewed: ViewedRun, run: Path | None) -> None:
    """Finds the run's tokenizer, unless one was named. Without any, ids stand for tokens, and it is said."""
    if viewed.source.texts is not None:
        return
    for folder in _token_folders(viewed, run):
        try:
            viewed.source.texts = TokenTexts(TokenDecoder(folder))
            return
        except ModelError as fault:
            viewed.notes.append(str(fault))
    viewed.notes.append(
        f"{viewed.source.name}: no tokenizer is here, so tokens are shown as ids; name its model with "
        "--tokenizer DIR"
    )
    viewed.source.about.setdefault("notes", []).append(
        "No tokenizer was found, so tokens are shown as ids: turnwise view --tokenizer DIR names them."
    )


def _token_folders(viewed: ViewedRun, run: Path | None) -> list[Path]:
    """Folders that may hold the run's tokenizer: its model's, then its checkpoints'."""
    if run is None:
        return []
    folders = []
    pretrain = viewed.source.about.get("pretrain")
    if isinstance(pretrain, str) and pretrain:
        folder = folder_here(pretrain)
        if folder is not None:
            folders.append(folder)
    folders += sorted((run / "checkpoints").glob("checkpoint-*"), reverse=True)
    return [folder for folder in folders if has_tokens(folder)]


def _read_run(viewed: ViewedRun, path: Path) -> None:
    about = viewed.source.about
    values = _settings(path / "config.yaml", viewed)
    about["config"] = str((path / "config.yaml").resolve())
    about["pretrain"] = values.get("pretrain")
    checkpoints = [file for file in path.glob("checkpoints/checkpoint-*") if file.is_dir()]
    checkpoints.sort(key=_checkpoint_number)
    about["checkpoints"] = [str(file.resolve()) for file in checkpoints]
    if (path / "best").is_dir():
        about["checkpoints"].append(str((path / "best").resolve()))
    refresh(viewed)


def _checkpoint_number(folder: Path) -> int:
    """The N of `checkpoint-N`; 0 for a copy under a name of its own."""
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else 0


def _settings(file: Path, viewed: ViewedRun) -> dict[str, Any]:
    """The settings of a run by dotted key. Notes those that differ from their defaults; all of them if this
    version can't read the config."""
    about = viewed.source.about
    try:
        values = dict(leaves(load_yaml(read_yaml(file), file.name)))
    except (ConfigError, AttributeError) as fault:
        viewed.notes.append(f"{file} can't be read ({str(fault).splitlines()[0]}): settings aren't shown")
        return {}
    config = _loaded(file)
    about["settings_are_all"] = config is None
    about["settings"] = [
        [key, value] for key, value in values.items() if config is None or config.departs(key)
    ]
    return values


def _loaded(file: Path) -> AgenticConfig | None:
    """The config of a file, also if its model is gone; None if this version can't read it."""
    for overrides in ([], [f"pretrain={NO_MODEL}"]):
        with suppress(ConfigError):
            config, _ = load_config(file, overrides, AgenticConfig)
            return config
    return None


def refresh(viewed: ViewedRun) -> None:
    """Reads the run's metrics again, what its health checks said, and the timeline that a profiled run has
    written at its end. Damaged metrics leave the curve empty."""
    if viewed.folder is None:
        return
    if viewed.source.timeline is None:
        _find_timeline(viewed, viewed.folder.path)
    if not viewed.folder.metrics.is_file():
        return
    about = viewed.source.about
    try:
        about["metrics"] = metric_columns(read_metrics(viewed.folder.metrics))
        sentences = read_sentences(viewed.folder.metrics)
    except (OSError, ValueError, LookupError, AttributeError) as fault:
        note = f"{viewed.folder.metrics} is damaged ({fault}): there are no curves"
        about["notes"] = [note]
        return
    about["health"] = [{"step": step + 1, "key": key, "text": text} for step, key, text in sentences]


def _choose(viewed: ViewedRun, words: Sequence[str]) -> None:
    """Chooses the steps of --steps. Numbers that no file has are said; raises DataError if none is left."""
    numbers = {int(word) for word in words if word != "last"}
    shown: set[int] = set()
    for episodes in viewed.source.episodes:
        steps = [step + episodes.first_step for step in sorted(episodes.file.steps)]
        chosen = numbers.intersection(steps)
        if "last" in words and steps:
            chosen.add(steps[-1])
        shown |= chosen
        episodes.chosen = sorted(chosen)
    name = viewed.source.name
    if not shown:
        raise DataError(f"--steps {','.join(words)}: {name} has none of them; steps count from 1")
    missing = sorted(numbers - shown)
    if missing:
        listed = ", ".join(map(str, missing[:5]))
        viewed.notes.append(
            f"{name} has no step {listed}; steps count from 1, and 0 is the validation before training"
        )
