"""`AgenticRLPipeline` runs SFT, an evaluation, GRPO and another evaluation, with the settings of one config
file."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.config.read.yaml_text import load_yaml, read_yaml
from turnwise.errors import ConfigError, TurnwiseError, nearest
from turnwise.lifecycle.interrupt import continued_by
from turnwise.rl_tool.comparison import compare_stages
from turnwise.rl_tool.parameters import Evaluate, LoadDataset, Train, parse
from turnwise.rl_tool.report_page import write_report
from turnwise.rl_tool.tool import RLTrainingTool, error_answer
from turnwise.rl_tool.training import with_preset

SECTIONS = ("model", "data", "sft", "grpo", "eval", "monitoring", "output_dir")
RESULTS = "training_results.json"
THRESHOLD = "sft_accuracy_threshold"


class StageError(TurnwiseError):
    """A stage failed or was recorded with other parameters, or the model after SFT isn't accurate enough."""


class AgenticRLPipeline:
    """Runs six stages from a config file with the sections `model`, `data`, `sft`, `grpo`, `eval`,
    `monitoring` (`docs/rl_tool.md`). A stage that is recorded in `training_results.json` isn't done again; an
    interrupted training run continues. Raises ConfigError for an unknown key or a wrong value, or if `sft`
    and `grpo` have the same output_dir."""

    def __init__(self, config_path: str | Path) -> None:
        file = str(config_path)
        values = load_yaml(read_yaml(Path(config_path)), file)
        self.config = _sections(values, file)
        self.rl_tool = RLTrainingTool()
        self.output_dir = Path(self.config.get("output_dir", "./output/pipeline"))
        parse(LoadDataset, self._section("data"))
        sft = parse(Train, with_preset(self._training("sft", "model")))
        grpo = parse(Train, with_preset(self._training("grpo", "model")))
        parse(Evaluate, self._evaluation("model"))
        if Path(sft.output_dir).resolve() == Path(grpo.output_dir).resolve():
            raise ConfigError(
                f"sft.output_dir and grpo.output_dir are both {sft.output_dir}; give each stage its own "
                "folder"
            )
        self.results = _recorded(self.output_dir / RESULTS)

    def run(self) -> dict[str, Any]:
        """Runs all stages in order and prints how the model has changed. Returns the results with
        `comparison` or, if a stage failed, its error in the form of the tool's answers."""
        try:
            self.stage1_prepare_data()
            sft_model = self.stage2_sft_training()
            self.check_gate(self.stage3_sft_evaluation(sft_model))
            self.stage5_grpo_evaluation(self.stage4_grpo_training(sft_model))
        except (TurnwiseError, OSError) as error:
            with suppress(OSError):  # the folder may be what can't be written
                self.stage6_save_results()
            return error_answer(error, "pipeline")
        self.stage6_save_results()
        print(self.results["comparison"]["sentence"], flush=True)
        return {"status": "success", "action": "pipeline", "output_dir": str(self.output_dir), **self.results}

    def stage1_prepare_data(self) -> dict[str, Any]:
        """Loads and examines the rows as demonstrations and as prompts; returns the report on the
        demonstrations."""
        rows = parse(LoadDataset, self._section("data")).model_dump(exclude_unset=True)
        report = self._stage("data", "load_dataset", {**rows, "format": "sft"})
        self._stage("rl_data", "load_dataset", {**rows, "format": "rl"})
        return report

    def stage2_sft_training(self) -> str:
        """Trains by SFT; returns the folder of the model."""
        base_model = self._section("model")["base_model"]
        result = self._stage("sft_training", "train", self._training("sft", base_model))
        return str(result["output_dir"])

    def stage3_sft_evaluation(self, model_path: str) -> dict[str, Any]:
        """Evaluates the model after SFT; returns the tool's answer."""
        return self._stage("sft_evaluation", "evaluate", self._evaluation(model_path))

    def check_gate(self, evaluation: Mapping[str, Any]) -> None:
        """Raises StageError if the accuracy is below `eval.sft_accuracy_threshold`."""
        threshold = self._section("eval").get(THRESHOLD, 0.0)
        accuracy = evaluation["accuracy"]
        if accuracy < threshold:
            raise StageError(
                f"accuracy after sft is {accuracy:.3f}, below eval.{THRESHOLD} {threshold}, so grpo doesn't "
                "start; train longer in the section sft with another output_dir, or lower the threshold"
            )

    def stage4_grpo_training(self, sft_model_path: str) -> str:
        """Trains by GRPO; returns the folder of the model."""
        result = self._stage("grpo_training", "train", self._training("grpo", sft_model_path))
        return str(result["output_dir"])

    def stage5_grpo_evaluation(self, model_path: str) -> dict[str, Any]:
        """Evaluates the model after GRPO; returns the tool's answer."""
        return self._stage("grpo_evaluation", "evaluate", self._evaluation(model_path))

    def stage6_save_results(self) -> str:
        """Writes the results as JSON, and a report with curves and answers as HTML; returns the file of the
        results. Once both evaluations are there, the results have their `comparison`."""
        comparison = compare_stages(self.results)
        if comparison:
            self.results["comparison"] = comparison
        self.output_dir.mkdir(parents=True, exist_ok=True)
        file = self.output_dir / RESULTS
        partial = file.with_suffix(".partial")
        partial.write_text(
            json.dumps(
                self.results,
                ensure_ascii=False,
                indent=2,
            )
            + "\n",
            encoding="utf-8",
        )
        partial.replace(file)
        write_report(self.output_dir / "report.html", self.results)
        return str(file)

    def _stage(
        self,
        name: str,
        action: str,
        parameters: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The recorded result of a stage; runs and records the stage if there is none yet."""
        recorded = self.results.get(name)
        request = {"action": action, **parameters}
        if recorded is not None:
            if recorded["parameters"] != request:
                raise StageError(
                    f"{name} was done with other parameters in {self.output_dir}; choose another output_dir"
                )
            print(f"{name}: done already", flush=True)
            return dict(recorded)
        print(f"{name}: begins", flush=True)
        arguments = dict(request)
        if action == "train" and not request.get("overwrite") and _has_checkpoint(request):
            arguments["resume"] = True
        with continued_by("the same command"):
            result = json.loads(self.rl_tool.run(arguments))
        if result["status"] != "success":
            # The pipeline sets `resume` by itself.
            message = result["message"].replace("resume=true", "the same command")
            raise StageError(f"{name}: {message}")
        self.results[name] = {**result, "parameters": request}
        self.stage6_save_results()
        return dict(self.results[name])

    def _section(self, name: str) -> dict[str, Any]:
        return dict(self.config.get(name) or {})

    def _training(self, kind: str, model: str) -> dict[str, Any]:
        return {
            **self._section("data"),
            "algorithm": kind,
            "model_name": model,  # the model of `data` only counts tokens, so that of the stage replaces it
            "output_dir": str(self.output_dir / kind),
            "use_tensorboard": True,
            **self._section("monitoring"),
            **self._section(kind),
        }

    def _evaluation(self, model_path: str) -> dict[str, Any]:
        evaluation = self._section("eval")
        evaluation.pop(THRESHOLD, None)
        parameters: dict[str, Any] = {"model_path": model_path}
        data = self._section("data")
        if "dataset" in data:
            parameters["dataset"] = data["dataset"]
        return {**parameters, "return_details": True, **evaluation}


def _has_checkpoint(request: Mapping[str, Any]) -> bool:
    run = Path(request.get("output_dir", ""), "run")
    return any(run.glob("*/checkpoints/checkpoint-*"))


def _sections(values: Any, file: str) -> dict[str, Any]:
    """The sections of a config file. Raises ConfigError if they are wrong. Doesn't check parameters of
    actions in them."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{file} holds a {type(values).__name__}; it has the sections {', '.join(SECTIONS)}"
        )
    for name, section in values.items():
        if name not in SECTIONS:
            raise ConfigError(f"{file}: unknown section {name!r}.{nearest(str(name), SECTIONS)}")
        if name != "output_dir" and not isinstance(section or {}, Mapping):
            raise ConfigError(f"{file}: {name} is {section!r:.60}; it is a section with its own keys")
    if list(values.get("model") or ()) != ["base_model"]:
        raise ConfigError(
            f"{file}: the section model has the key base_model, a folder or a name of the hub, and no other"
        )
    if not isinstance(values.get("output_dir", ""), str):
        raise ConfigError(f"{file}: output_dir is {values['output_dir']!r:.60}; it is the name of a folder")
    evaluation = values.get("eval") or {}
    threshold = evaluation.get(THRESHOLD, 0.0)
    if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise ConfigError(f"{file}: eval.{THRESHOLD} is {threshold!r:.60}; it is an accuracy from 0 to 1")
    return dict(values)


def _recorded(file: Path) -> dict[str, Any]:
    """The results of earlier stages; {} if there is no file."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        hint = "remove it: a training that is done is found by its checkpoint, and not done again"
        raise ConfigError(f"{file}: isn't a JSON object of results ({error}); {hint}") from error
