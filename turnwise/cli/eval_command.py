"""`turnwise eval CONFIG --model DIR …`: the success of saved models on the validation tasks."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from turnwise.cli.options import new_file, new_traces, read_examined, writable_file
from turnwise.config import SettingsTable, require, unavailable_to_play
from turnwise.errors import ConfigError, counted
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.pipelines.evaluate import Evaluation, Score, score_table
from turnwise.rollout.journal import Journal
from turnwise.runtime.disk import replace_file
from turnwise.types import Group

if TYPE_CHECKING:
    from turnwise.assemble.saved import Mode


class Result(NamedTuple):
    """The result of one model in one mode."""

    model: str
    mode: "Mode"
    evaluation: Evaluation


def run(options: argparse.Namespace) -> int:
    """Plays the config's validation tasks with saved models, and prints each model's success with its
    interval and pass@k."""
    examined = read_examined(options, "play")
    config = examined.config
    if options.samples and options.greedy and not options.sampled:
        raise ConfigError(
            f"--samples {options.samples} with --greedy alone: greedy episodes of a task are all the same"
        )
    # Absolute paths, since an environment may change the folder; a name on the hub isn't a path.
    absolute = {name: str(Path(name).absolute()) for name in options.model if Path(name).exists()}
    json_file = _json_file(options.json) if options.json else None
    rollouts = new_file(options.rollouts, "--rollouts").absolute() if options.rollouts else None
    traces = new_traces(config, rollouts)
    require(unavailable_to_play(config))
    models = options.model or [config.actor_train.model_args.model_name_or_path]
    # torch takes seconds to import; a wrong config has been refused by now.
    with ends_at_once():
        from turnwise.assemble.saved import evaluate_modes, validation_mode

    modes = _modes(options, validation_mode(config))
    played = PlayedEpisodes(rollouts)
    results: list[Result] = []
    try:
        for model in models:
            evaluations = evaluate_modes(
                examined,
                modes,
                options.episodes,
                options.samples,
                absolute.get(model, model),
                SettingsTable.show,
                played.write,
                rollouts,
                first_step=len(results),
            )
            for mode, evaluation in evaluations:
                results.append(Result(model, mode, evaluation))
    finally:
        if results:
            _report(results, json_file, config.show_metrics)
        played.report()
        if results and traces:
            print(f"traces     {traces}: turnwise trace shows them")
    return 0


class PlayedEpisodes:
    """Writes the episodes of each model and mode to the file of --rollouts, as a step of their own."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._num_written = 0

    def write(self, groups: Sequence[Group]) -> None:
        """Appends the groups of the next model and mode."""
        if self._file is None:
            return
        journal = Journal(self._file)
        journal.append(self._num_written, groups)
        journal.close()
        self._num_written += 1

    def report(self) -> None:
        """Says what the file holds."""
        if self._num_written:
            batches = counted(self._num_written, "batch")
            print(f"episodes   {self._file}: {batches}, in the order of the table; turnwise view shows them")


def _json_file(path: str) -> Path:
    """The file of --json. Raises ConfigError if it can't be written, or is there and isn't a result of this
    command."""
    file = writable_file(path, "--json").absolute()
    if not file.exists():
        return file
    try:
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        is_result = all({"model", "mode"} <= entry.keys() for entry in results)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
        is_result = file.stat().st_size == 0
    if not is_result:
        raise ConfigError(
            f"--json {path} already exists and isn't a result of `turnwise eval`; name another file"
        )
    return file


def _report(results: Sequence[Result], json_file: Path | None, shown: Sequence[str]) -> None:
    """Prints the results with the metrics to be shown, and writes all of them to `json_file` if it is
    given."""
    print(score_table(list(_rows(results)), shown))
    for model, mode, evaluation in results:
        for sentence in [*evaluation.too_few_samples(), *evaluation.failures()]:
            print(f"{_short(model, results)}, {mode}: {sentence}")
    if json_file:
        # The first entry is also at the top level.
        entries = [
            {"model": model, "mode": mode, **evaluation.to_json()} for model, mode, evaluation in results
        ]
        text = json.dumps({**entries[0], "results": entries}, indent=2) + "\n"
        replace_file(json_file.resolve(), text.encode())


def _modes(options: argparse.Namespace, validation_mode: "Mode") -> "list[Mode]":
    """The modes that the options name, by default both. `validation_mode`, that of validation in training,
    comes first."""
    modes: list[Mode] = []
    if options.sampled or not options.greedy:
        modes.append("sampled")
    if options.greedy or not options.sampled:
        modes.append("greedy")
    return sorted(modes, key=lambda mode: mode != validation_mode)


def _rows(results: Sequence[Result]) -> "Iterator[tuple[str, Score]]":
    """Yields the rows of the score table: each result's overall score, then its score per tag if there are
    several tags."""
    for model, mode, evaluation in results:
        yield f"{_short(model, results)}, {mode}", evaluation.overall
        if len(evaluation.by_tag) > 1:
            yield from ((f"  {tag}", score) for tag, score in evaluation.by_tag.items())


def _short(model: str, results: Sequence[Result]) -> str:
    """The last part of a model's path; the whole path if another model's has the same last part."""
    models = {result.model for result in results}
    names = [Path(path).name for path in models]
    name = Path(model).name
    return name if names.count(name) == 1 else model
