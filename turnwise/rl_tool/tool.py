"""`RLTrainingTool` runs an action (a dict) and answers in JSON. Agents call it as a function; people use
`turnwise tool`."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, TurnwiseError, nearest
from turnwise.lifecycle.interrupt import continued_by
from turnwise.model_files.folder import base_of_adapter
from turnwise.rl_tool import loaded_rows as data
from turnwise.rl_tool.evaluation import evaluate
from turnwise.rl_tool.parameters import (
    ACTIONS,
    CreateReward,
    Evaluate,
    Export,
    LoadDataset,
    Train,
    function_schema,
    parse,
)
from turnwise.rl_tool.requirements import without_effect
from turnwise.rl_tool.rewards import BUILT_IN, create
from turnwise.rl_tool.training import train, with_preset
from turnwise.runtime.disk import file_error
from turnwise.runtime.replaceable import require_new_folder

NUM_SHOWN = 3
_RESUME = "resume=true"
_CONTINUED = {
    "train": "a training run continues with resume_from_checkpoint=true",
    "pipeline": "the same command does no stage again that is done, and continues a training run",
}
"""How an action continues after a full disk, for those that can. `error_answer` names the key as the tool
does."""


class RLTrainingTool:
    """One tool with the actions train, load_dataset, create_reward, evaluate and export (`docs/rl_tool.md`).

    >>> reply = json.loads(RLTrainingTool().run({"action": "create_reward", "reward_type": "acuracy"}))
    >>> reply["message"]  # doctest: +ELLIPSIS
    "reward_type 'acuracy' isn't one of accuracy, length_penalty, ... Did you mean 'accuracy'?"
    """

    name = "rl_training"

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}
        self._rewards: dict[str, Callable[..., Any]] = {}

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in OpenAI's form."""
        return function_schema()

    def register_dataset(self, name: str, dataset: Any) -> None:
        """Registers rows (a list of dicts, or a `datasets.Dataset`) under a name, for the parameter `dataset`
        of actions."""
        self._datasets[name] = dataset

    def register_reward_function(self, name: str, function: Callable[..., Any]) -> None:
        """Registers a function `(completions, **columns) -> numbers` under a name, for the parameter
        `reward_type` of actions. Raises ConfigError if a built-in reward has this name."""
        if name in BUILT_IN:
            raise ConfigError(f"reward {name!r} is built in; register yours under another name")
        self._rewards[name] = function

    def run(self, parameters: Mapping[str, Any]) -> str:
        """The answer of `run_dict` as JSON, without `dataset_object` and `reward_function`, which JSON can't
        hold."""
        answer = self.run_dict(parameters)
        answer.pop("dataset_object", None)
        answer.pop("reward_function", None)
        return json.dumps(answer, ensure_ascii=False, indent=2, default=str)

    def run_dict(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Runs an action. The answer's `status` is `success`, or `error` after a TurnwiseError or OSError
        (`error_answer`)."""
        values = dict(parameters)
        name = values.pop("action", None)
        try:
            if str(name) not in ACTIONS:
                raise ConfigError(
                    f"action {name!r} isn't one of {', '.join(ACTIONS)}.{nearest(str(name), ACTIONS)}"
                )
            if name == "train":
                values = with_preset(values)
            action = parse(ACTIONS[name], values)
            answer: dict[str, Any] = {"status": "success", "action": name}
            sentences = without_effect(action)
            if sentences:
                answer["without_effect"] = sentences
            with continued_by(_RESUME):
                return answer | self._answer(action)
        except (TurnwiseError, OSError) as error:
            return error_answer(error, name)

    def _answer(self, action: Any) -> dict[str, Any]:
        match action:
            case Train():
                return train(action, self._datasets, self._rewards)
            case LoadDataset():
                return self._load(action)
            case CreateReward():
                return create(action.reward_type, action.model_extra or {}, self._rewards)
            case Evaluate():
                return evaluate(action, self._datasets)
        return _export(action)

    def _load(self, action: LoadDataset) -> dict[str, Any]:
        loaded = data.load(action, action.format, self._datasets, number=100, takes_null=True)
        count = None if action.model_name is None else _token_counter(action.model_name)
        return {
            "dataset": loaded.name,
            "format": action.format,
            "split": action.split or "train",
            "dataset_size": len(loaded.rows),
            "sample_keys": list(loaded.rows[0]),
            "samples": [data.formatted(row) for row in loaded.rows[:NUM_SHOWN]],
            "quality": data.quality(loaded, count),
            "dataset_object": loaded.rows,
        }


def _token_counter(model: str) -> Callable[[str], int]:
    from turnwise.models.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _export(action: Export) -> dict[str, Any]:
    from turnwise.models.export import export_model
    from turnwise.models.load import parse_dtype

    out = Path(action.output_dir)
    require_new_folder(out, "output_dir")
    base = base_of_adapter(action.model_path)
    model = export_model(action.model_path, out, parse_dtype(action.dtype))
    return {
        "model_path": action.model_path,
        "output_dir": str(out),
        "merged_into": base,
        "total_parameters": model.num_parameters(),
    }


def error_answer(error: Exception, action: Any) -> dict[str, Any]:
    """An error as the tool's answer: `code` is the kind of error, `hint` the part of the message that says
    what to do."""
    kind = type(error).__name__.removesuffix("Error").removesuffix("Fault")
    code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    text = str(error)
    if isinstance(error, OSError):
        text = file_error(error, _CONTINUED.get(action)) or text
    # Errors name the keys of configs; the tool's own parameters are what its caller can change.
    model_parameter = "model_path" if action in ("evaluate", "export") else "model_name"
    resume = "the same command" if action == "pipeline" else _RESUME
    words = {
        "`pretrain`": f"`{model_parameter}`",
        "resume_from_checkpoint=true": resume,
        ", or point checkpoint_config.output_dir elsewhere or lower max_ckpt_to_keep": "",
    }
    for key, parameter in words.items():
        text = text.replace(key, parameter)
    message, _, hint = text.rpartition("; ")
    if not message:
        suggestion = re.search(r"Did you mean .*\?", hint)
        hint = "docs/rl_tool.md explains each action and its parameters"
        if suggestion:
            hint = suggestion.group()
    return {"status": "error", "action": action, "code": code or "system", "message": text, "hint": hint}
