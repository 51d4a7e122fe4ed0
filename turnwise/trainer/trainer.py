"""`Trainer`: `turnwise train` from Python, with objects as arguments and steps to iterate over."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from turnwise.config import AgenticConfig, require, unavailable
from turnwise.config.published.coming_from import counterpart
from turnwise.data.tables import listed, numbered, plain_columns
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.examine.examined import Examined, examine
from turnwise.examine.read import parse_examined, parse_examined_sft
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.pipelines.evaluate import Evaluation
from turnwise.pipelines.step_report import StepReport
from turnwise.report.curve import curve_figure
from turnwise.runtime.replaceable import require_replaceable
from turnwise.tracking.jsonl import read_metrics
from turnwise.tracking.terminal import warnings_on_terminal
from turnwise.trainer.callbacks import asks_to_stop, check_callbacks
from turnwise.trainer.objects import Objects, custom_envs, data_section, plain_values, tool_names
from turnwise.trainer.paths import as_path, bases_of, folders_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AT_WORK = Lock()


class Trainer:
    """Trains a model by reinforcement learning, as `turnwise train` does with a file.

    `docs/python.md` has examples. The config is checked when the Trainer is made; models are found and loaded
    when it runs.

    Args:
        model: folder of the model, or its name on the Hugging Face hub (`pretrain` of the config). env: a
        class, a registered name, `module:Class`, or a section of `custom_envs`; for several, a dict of these
        by tag. algorithm: a name (`adv_estimator` of the config) or your own class. train_dataset: rows to
        train on: a list of dicts, a `datasets.Dataset`, or names of files. eval_dataset: rows for validation,
        in the same forms. reward_funcs: functions, or their names, that score what was played;
        `reward_weights` has a number for each [all 1].
            An entry of `data.reward` is one too: `{"name": function, "form": "messages"}`.
        rewards: another name of `reward_funcs`. tools: functions, or objects with the methods of
        `protocols.Tool`, that rows are played with; rows that name no agent
            are then played by `tool_agent`.
        callbacks: objects with `on_validation`, `on_step_end` or `on_checkpoint`
        (`turnwise.trainer.callbacks`). is_quiet: True prints no steps. config_file: a YAML file; the other
        arguments replace its settings (`from_config`). config: every other key of the config; a section is a
        dict.

    Raises ConfigError or NotAvailableError, with the message of `turnwise train`, if the config is
    refused."""

    def __init__(
        self,
        model: str | Path | None = None,
        env: Any = None,
        algorithm: Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        reward_funcs: Any = None,
        rewards: Any = None,
        reward_weights: Sequence[float] | None = None,
        tools: Any = None,
        callbacks: Sequence[object] = (),
        is_quiet: bool = False,
        config_file: str | Path | None = None,
        **config: Any,
    ) -> None:
        self.run_folder: Path | None = None
        """Folder of the last run, None before the first."""
        check_callbacks(callbacks)
        self._callbacks = callbacks
        self.is_quiet = is_quiet
        self._file = config_file
        self._objects = Objects()
        if model is not None and not isinstance(model, str | Path):
            raise ConfigError(
                f"model: got an object of {type(model).__name__}; a Trainer loads a model by its folder or "
                "its name on the hub, so save yours and its tokenizer into one folder with "
                "save_pretrained(folder), and give model=folder"
            )
        _set_alias(config, "model", "pretrain", model)
        _set_alias(config, "algorithm", "adv_estimator", algorithm)
        if env is not None:
            config["custom_envs"] = custom_envs(env)
        if not isinstance(config.get("data") or {}, Mapping):
            raise ConfigError(f"data: got {str(config['data'])[:60]}; it is a section: a dict of its keys")
        if rewards is not None and reward_funcs is not None:
            raise ConfigError(
                "rewards and reward_funcs are the same argument, and both are given; remove one"
            )
        if rewards is None:
            rewards = reward_funcs
        data = data_section(train_dataset, eval_dataset, rewards, reward_weights, self._objects)
        if data:
            config["data"] = {**(config.get("data") or {}), **data}
        if tools is not None:
            config["agent"] = {**(config.get("agent") or {}), "tools": tool_names(tools, self._objects)}
            if config_file is None:  # a file names the agent itself
                config["data"] = {"default_agent": "tool_agent", **(config.get("data") or {})}
        if config_file is None:
            _require_enough(config)
        self._values = {key: _plain_setting(key, value, self._objects) for key, value in config.items()}
        self._examined = self._examine({})
        self.config = self._examined.config
        require(unavailable(self.config))

    @classmethod
    def from_config(cls, path: str | Path, **overrides: Any) -> "Trainer":
        """A Trainer with the settings of a YAML file. `overrides` are arguments of Trainer that replace the
        file's settings."""
        folder = str(as_path(path, "from_config").absolute().parent)
        if folder not in sys.path:  # a user's `module:Class` stands beside the config
            sys.path.append(folder)
        return cls(config_file=path, **overrides)

    def train(self, max_steps: int | None = None) -> None:
        """Trains until `max_steps` steps (default: the config's) are done in total; see `steps`."""
        for _ in self.steps(max_steps):
            pass

    def steps(self, max_steps: int | None = None) -> "Iterator[StepReport]":
        """Trains, and yields a report after each finished step and after the final validation. If the loop is
        left early (`break`, an exception, Ctrl-C), the finished steps are saved. The next call continues
        after the newest checkpoint, up to `max_steps` in total (default: the config's). If a callback raises,
        saves the finished steps, then raises EnvironmentFault, or its TurnwiseError. Raises NotAvailableError
        if a Trainer of this process is at work already."""
        checkpoint = self.checkpoint
        changes: dict[str, Any] = {}
        if checkpoint is not None:
            changes["resume_from_checkpoint"] = str(checkpoint)
        if max_steps is not None:
            changes["max_steps"] = max_steps
        examined = self._examined
        if changes:
            examined = self._examine(changes)
        config = examined.config
        if checkpoint is not None and _step_of(checkpoint) >= config.max_steps:
            print(
                f"all {config.max_steps} steps are done: {checkpoint}; "
                "train(max_steps=…) continues from there"
            )
            return
        with _alone():
            self._objects.install()
            from turnwise.assemble.agentic import build_agentic
            from turnwise.assemble.whole_run import whole_run

            build = partial(build_agentic, examined, is_quiet=self.is_quiet)
            with whole_run(config, build, self.is_quiet) as pipeline:
                self.config = config
                self.run_folder = pipeline.folder.path
                for report in pipeline.steps():
                    if asks_to_stop(self._callbacks, report):
                        pipeline.checkpoints.end_here()
                    yield report

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of the last run, None if there is none."""
        from turnwise.lifecycle.checkpoint_files import all_checkpoints
        from turnwise.lifecycle.resume import checkpoints_folder

        if self.run_folder is None:
            return None
        checkpoints = all_checkpoints(checkpoints_folder(self.config, self.run_folder))
        return checkpoints[-1] if checkpoints else None

    def evaluate(self, model: str | Path | None = None, num_tasks: int | None = None) -> Evaluation:
        """Plays the config's validation tasks, or the first `num_tasks`, with `model`, just as a validation
        in training does. The default `model` is the newest checkpoint, or the initial model if there is
        none."""
        with _alone(), warnings_on_terminal(only_new=True):
            self._objects.install()
            from turnwise.assemble.saved import evaluate_model

            source = model or self.checkpoint
            if source is not None:
                source = str(source)
            return evaluate_model(examine(self.config), source, num_tasks)

    @property
    def best(self) -> Path | None:
        """Folder of the model that `save_best` keeps, None if there is none yet."""
        from turnwise.lifecycle.by_validation import read_best

        if self.run_folder is None or self.config.save_best is None:
            return None
        folder = RunFolder(self.run_folder).best
        return folder if read_best(folder) else None

    def save(self, folder: str | Path, best: bool = False) -> Path:
        """Writes a plain model folder, with the tokenizer and merged adapters: the model of the newest
        checkpoint, or with `best` the one that `save_best` kept. Prints the model's step. Replaces a model
        that is already in the folder. Raises ConfigError if there is no model to save yet, or `folder` is a
        file, a folder with anything else than a model, a checkpoint, or a model that this Trainer starts
        from."""
        from turnwise.lifecycle.by_validation import read_best
        from turnwise.models.export import export_model

        folder = as_path(folder, "save")
        best_model = self.best
        source = best_model if best else self.checkpoint
        if source is None:
            if best and self.config.save_best is None:
                raise ConfigError(
                    "save: best=True needs a model that save_best has kept; set save_best={} and eval_steps"
                )
            missing = "best model" if best else "checkpoint"
            raise ConfigError(f"save: this Trainer has no {missing} yet; call train() first")
        require_replaceable(folder, "save", [*folders_named(self.config), *bases_of(source)])
        export_model(source, folder)
        best_text = ""
        if best_model:
            values = read_best(best_model)
            best_text = "the best model, {metric} {value:g} after {step} steps".format(**values)
        if best:
            print(f"{folder}: {best_text}")
            return folder
        text = f"the model after {_step_of(source)} steps"
        if best_text:
            text += f"; best=True saves {best_text}"
        print(f"{folder}: {text}")
        return folder

    def plot(self) -> "Figure":
        """The learning curve of the last run, as a figure that a notebook shows. Raises ConfigError before
        the first run."""
        if self.run_folder is None:
            raise ConfigError("plot: this Trainer has trained nothing yet; call train() first")
        return curve_figure(read_metrics(self.run_folder / "metrics.jsonl"), self.config.exp_name)

    @staticmethod
    def sft(model: str | Path, messages: Any, is_quiet: bool = False, **config: Any) -> Path:
        """Fine-tunes a model on demonstrations, as `turnwise sft` does, and returns the folder of the new
        model.

        Args:
            model: folder of the model, or its name on the Hugging Face hub.
            messages: rows `{"messages": [{"role": …, "content": …}, …]}`, a pyarrow.Table or
                datasets.Dataset of them, plain lists of messages, or names of files.
            is_quiet: True prints no steps.
            config: every other key of the config of `turnwise sft`.
        """
        objects = Objects()
        values = {key: plain_values(value, objects, key) for key, value in config.items()}
        values["pretrain"] = str(model)
        values["train_files"] = _demonstrations(messages, values)
        examined, notes = parse_examined_sft(values)
        _say(notes)
        with _alone():
            from turnwise.assemble.sft import fine_tune

            return fine_tune(examined, is_quiet)

    def _examine(self, changes: Mapping[str, Any]) -> Examined:
        self._objects.install()
        examined, notes = parse_examined({**self._values, **changes}, self._file)
        _say(notes)
        return examined


def _set_alias(config: dict[str, Any], argument: str, key: str, value: Any) -> None:
    """Sets the key of a config that an argument of Trainer stands for."""
    if value is None:
        return
    if key in config:
        raise ConfigError(f"{argument} and {key} are the same setting, and both are given; remove one")
    config[key] = value


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _plain_setting(key: str, value: Any, objects: Objects) -> Any:
    """`plain_values`; None for an object under a key of another system, which `_parse` refuses with the key
    to use here."""
    try:
        return plain_values(value, objects, key)
    except ConfigError:
        if key in AgenticConfig.model_fields or not counterpart((key,)):
            raise
        return None


def _require_enough(config: Mapping[str, Any]) -> None:
    if "pretrain" not in config:
        raise ConfigError(
            "a Trainer needs a model: model='runs/model', a folder or a name of the Hugging Face hub; "
            "`turnwise make-model --size tiny --out runs/model` makes a small one with random weights"
        )
    data = config.get("data") or {}
    if "custom_envs" not in config and not data.get("train_files"):
        reason = "nothing to play"
        if "reward" in data:
            reason = "reward_funcs score what was played, and there is nothing to play"
        raise ConfigError(
            f"{reason}: give env=YourEnv, env='frozen_lake', or train_dataset=rows with reward_funcs"
        )


def _demonstrations(messages: Any, values: Mapping[str, Any]) -> list[str]:
    """The names of the files of demonstrations. Rows are written to a file beside the runs; their hash is in
    its name. Raises DataError for a row that a file can't hold."""
    if isinstance(messages, str | Path):
        return [str(messages)]
    rows = [row if isinstance(row, Mapping | str | Path) else {"messages": row} for row in listed(messages)]
    if rows and all(isinstance(row, str | Path) for row in rows):
        return [str(row) for row in rows]
    lines = []
    for place, row in numbered(rows, "messages"):
        columns = plain_columns(row, place)
        lines.append(json.dumps(columns, ensure_ascii=False) + "\n")
    text = "".join(lines)
    folder = Path(values.get("output_dir") or "runs") / (values.get("exp_name") or "turnwise")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    file = folder / f"messages-{digest}.jsonl"
    # Other ranks and runs of the same rows read and write the file too.
    partial_file = file.with_name(f"{file.name}.{os.getpid()}")
    partial_file.write_text(text, encoding="utf-8")
    partial_file.replace(file)
    return [str(file)]


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


@contextmanager
def _alone() -> Iterator[None]:
    """Raises NotAvailableError if a Trainer of this process, this one included, is in this context
    already."""
    if not _AT_WORK.acquire(blocking=False):
        raise NotAvailableError(
            "a Trainer of this process is still at work, and two would share torch's random numbers and the "
            "signals: leave its loop over steps(), or close() what steps() returned, or use a process each"
        )
    try:
        yield
    finally:
        _AT_WORK.release()
