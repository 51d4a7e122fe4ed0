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

    >>> json.loads(RLTrainingTool().run({"action": "create_reward", "reward_type": "acuracy"}))["message"]
    "reward_type 'acuracy' isn't one of accuracy, length_penalty, step, format, combined, judge. Did you mean
    'accuracy'?"
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
        plain = {
            key: value for key, value in answer.items() if key not in ("dataset_object", "reward_function")
        }
        return json.dumps(plain, ensure_ascii=False, indent=2, default=str)

    def run_dict(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Runs an action. The answer's `status` is `success`, or `error` after a TurnwiseError or OSError
        (`error_answer`)."""
        given = dict(parameters)
        action = given.pop("action", None)
        try:
            if str(action) not in ACTIONS:
                raise ConfigError(
                    f"action {action!r} isn't one of {', '.join(ACTIONS)}.{nearest(str(action), ACTIONS)}"
                )
            asked = parse(ACTIONS[action], with_preset(given) if action == "train" else given)
            sentences = without_effect(asked)
            unread = {"without_effect": sentences} if sentences else {}
            with continued_by(_RESUME):
                return {"status": "success", "action": action, **unread, **self._answer(asked)}
        except (TurnwiseError, OSError) as error:
            return error_answer(error, action)

    def _answer(self, asked: Any) -> dict[str, Any]:
        match asked:
            case Train():
                return train(asked, self._datasets, self._rewards)
            case LoadDataset():
                return self._load(asked)
            case CreateReward():
                return create(asked.reward_type, asked.model_extra or {}, self._rewards)
            case Evaluate():
                return evaluate(asked, self._datasets)
        return _export(asked)

    def _load(self, asked: LoadDataset) -> dict[str, Any]:
        loaded = data.load(asked, asked.format, self._datasets, number=100, takes_null=True)
        count: Callable[[str], int] | None = None
        if asked.model_name is not None:
            from turnwise.models.load import load_tokenizer

            tokenizer = load_tokenizer(asked.model_name)

            def count(text: str) -> int:
                return len(tokenizer(text, add_special_tokens=False)["input_ids"])

        return {
            "dataset": loaded.name,
            "format": asked.format,
            "split": asked.split or "train",
            "dataset_size": len(loaded.rows),
            "sample_keys": list(loaded.rows[0]),
            "samples": [data.formatted(row) for row in loaded.rows[:NUM_SHOWN]],
            "quality": data.quality(loaded, count),
            "dataset_object": loaded.rows,
        }


def _export(asked: Export) -> dict[str, Any]:
    from turnwise.models.load import export_model, parse_dtype

    out = Path(asked.output_dir)
    require_new_folder(out, "output_dir")
    base = base_of_adapter(asked.model_path)
    model = export_model(asked.model_path, out, parse_dtype(asked.dtype))
    return {
        "model_path": asked.model_path,
        "output_dir": str(out),
        "merged_into": base,
        "total_parameters": model.num_parameters(),
    }


def error_answer(error: Exception, action: Any) -> dict[str, Any]:
    """An error as the tool's answer: `code` is the kind of error, `hint` the part of the message that says
    what to do."""
    code = re.sub(
        r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error").removesuffix("Fault")
    ).lower()
    sentence = file_error(error, _CONTINUED.get(action)) if isinstance(error, OSError) else None
    text = sentence or str(error)
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
        hint = next(
            iter(re.findall(r"Did you mean .*\?", hint)),
            "docs/rl_tool.md explains each action and its parameters",
        )
    return {"status": "error", "action": action, "code": code or "system", "message": text, "hint": hint}
