"""The parameters of each action of the tool: their types, defaults and meaning. The function schema is
generated from them."""

import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from turnwise.config.schema.model_args import Dtype
from turnwise.config.schema.section import Fraction, NonNegative, Positive
from turnwise.errors import ConfigError, nearest

PositiveInt = Annotated[int, Field(ge=1)]
PYTHON_ONLY = ("custom_reward",)
"""Parameters that JSON can't hold. `function_schema` leaves them out."""
KEYS_OF_CONFIGS = {
    "resume_from_checkpoint": "resume",
    "pretrain": "model_name, and model_path of a model that was trained",
}
"""Keys that messages of a training run name, and the tool's parameters for them."""


class Action(BaseModel):
    """Base class of the parameters of an action. Unknown parameters are refused."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), frozen=True
    )


class RowChoice(Action):
    """Base class of the parameters of actions that work on rows."""

    dataset: Any = None
    """`gsm8k`, `generated` (new word problems), a registered name, a file or folder, a hub data set, or rows
    in Python [gsm8k if it is in ./gsm8k or ./data/gsm8k or can be read from the hub, else `generated`]."""
    split: Literal["train", "test"] | None = None
    """The split to read, if the data set has splits [train; test for evaluate]."""
    max_samples: PositiveInt | None = None
    """Maximum number of rows, from the first on [all rows; 1,000 generated ones; 100 rows for load_dataset
    and evaluate]."""


class Train(RowChoice):
    """Trains a model: supervised fine-tuning (sft), or reinforcement learning (grpo, ppo)."""

    model_name: str
    """Folder of a model, or its name on the hub."""
    algorithm: Literal["sft", "grpo", "ppo"] = "sft"
    """How the model is trained."""
    preset: Literal["quick", "small", "medium", "full"] | None = None
    """Sizes, from a quick trial to a full run, and stricter default rewards; parameters given explicitly take
    precedence."""
    num_epochs: PositiveInt = 3
    """Passes over the rows."""
    batch_size: PositiveInt = 4
    """Rows per training step; for grpo and ppo, prompts, each with num_generations answers."""
    output_dir: str = "./output"
    """The folder of the result; the run itself is in output_dir/run."""
    use_lora: bool = True
    """Train LoRA adapters instead of all parameters."""
    lora_rank: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: Positive | None = None
    """Scale of the adapters [2 × lora_rank]."""
    lora_target_modules: list[str] | None = None
    """Modules that get adapters [all linear ones]."""
    dtype: Dtype = "fp32"
    """Dtype of the computation; trained weights stay fp32."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's own config (zero_optimization), which shards training over the processes of a launcher
    [plain torch]."""
    learning_rate: Positive | None = None
    """The optimiser's learning rate [sft 2e-5, with LoRA 1e-4; grpo and ppo 1e-6, with LoRA 1e-5]."""
    critic_learning_rate: Positive | None = None
    """Learning rate of ppo's value model, which is trained in full [learning_rate; without LoRA 10 × that, up
    to 1e-3]."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to 0 at the last step."""
    warmup_ratio: Fraction = 0.0
    """Share of the steps in which the learning rate rises."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    num_generations: PositiveInt | None = None
    """Answers to each prompt [grpo 8, ppo 1]."""
    kl_coef: NonNegative = 0.001
    """Weight of the KL to the initial model in the loss; 0 = off."""
    clip_range: Positive = 0.2
    """The probability ratio is clipped to 1 ± clip_range."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens per answer [512, at most half of the model's context]."""
    temperature: Positive = 1.0
    """Temperature of the answers that are trained on."""
    reward_type: str | list[str] | dict[str, float] = "accuracy"
    """A reward's name, several names, or weights by name."""
    reward_config: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reward; for several rewards, a dict of parameters by the reward's name."""
    checker: Literal["text", "math_verify"] = "text"
    """Who compares answers with the true ones: the text reader, or also the package math-verify."""
    custom_reward: Any = None
    """A function (completions, **columns) -> numbers, in place of reward_type."""
    use_tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    use_wandb: bool = False
    """Send metrics to Weights & Biases."""
    wandb_project: str | None = None
    """Project at Weights & Biases [the name `run`]."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of everything random."""
    resume: bool = False
    """Continue from the newest checkpoint in output_dir/run."""
    overwrite: bool = False
    """Replace the result that is in output_dir."""


class LoadDataset(RowChoice):
    """Loads rows, shows the first three as text with roles and true answers, and counts the rows that have
    faults."""

    format: Literal["sft", "rl"] = "sft"
    """Demonstrations for SFT, or prompts with their true answers."""
    model_name: str | None = None
    """A model whose tokenizer counts the rows' tokens for the report [four characters count as a token]."""


class CreateReward(Action):
    """Makes a reward function. Further parameters are the reward's own."""

    model_config = ConfigDict(extra="allow")

    reward_type: str = "accuracy"
    """accuracy, length_penalty, step, format, combined, judge, or a registered name."""


class Evaluate(RowChoice):
    """Measures a model on rows with true answers."""

    model_path: str
    """Folder of a model or of a LoRA adapter, or its name on the hub."""
    use_lora: bool | None = None
    """Whether the adapter of model_path is used; false measures its base model [true]."""
    k: PositiveInt = 1
    """Answers to each prompt, for pass@k and majority@k; 1 = one greedy answer."""
    temperature: Positive = 1.0
    """Temperature of the answers if k is more than 1."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens per answer [512, at most half of the model's context]."""
    checker: Literal["text", "math_verify"] = "text"
    """Who compares answers with the true ones: the text reader, or also the package math-verify."""
    return_details: bool = False
    """Also return every answer, not only the metrics."""
    output_dir: str | None = None
    """Folder of worst_samples.jsonl [model_path/evaluation, or ./output/evaluation for a model on the
    hub]."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of everything random."""


class Export(Action):
    """Writes a model as a plain Hugging Face folder. A LoRA adapter is merged into its base model."""

    model_path: str
    """Folder of a model or of a LoRA adapter."""
    output_dir: str
    """A new or empty folder."""
    dtype: Dtype = "fp32"
    """Dtype of the weights."""


ACTIONS: dict[str, type[Action]] = {
    "train": Train,
    "load_dataset": LoadDataset,
    "create_reward": CreateReward,
    "evaluate": Evaluate,
    "export": Export,
}
P = TypeVar("P", bound=Action)


def parse(kind: type[P], values: Mapping[str, Any]) -> P:
    """The checked parameters of an action. Raises ConfigError with a sentence for each parameter that is
    wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(
            "; ".join(_sentence(kind, item) for item in error.errors(include_url=False))
        ) from error


def _sentence(kind: type[Action], item: Mapping[str, Any]) -> str:
    name = str(item["loc"][0])
    if item["type"] == "extra_forbidden" and name in KEYS_OF_CONFIGS:
        return f"{name}: a key of configs; this tool calls it {KEYS_OF_CONFIGS[name]}"
    if item["type"] == "extra_forbidden":
        return (
            f"{name}: unknown "
            f"parameter.{nearest(name, kind.model_fields) or ' Known are ' + ', '.join(kind.model_fields)}"
        )
    if item["type"] == "missing":
        return f"{name}: is needed; give it: {kind.model_fields[name].description}"
    return f"{name}: {item['msg'][:1].lower()}{item['msg'][1:]} (got {item['input']!r:.60})"


def describe_action(action: str) -> str:
    """The parameters of an action for a terminal: those that are needed first, each with its type, default
    and meaning."""
    kind = ACTIONS[action]
    parameters = [(name, field) for name, field in kind.model_fields.items() if name not in PYTHON_ONLY]
    parameters.sort(key=lambda entry: not entry[1].is_required())
    lines = [f"turnwise tool {action} --NAME VALUE ...", "", str(kind.__doc__), ""]
    for name, field in parameters:
        lines.append(f"  --{name} {_type_name(kind, name)}{_default(field)}")
        text = " ".join((field.description or "").split())
        lines += textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")
    advice = (
        "Values are YAML: --use_lora false, --lora_target_modules '[q_proj, v_proj]'. docs/rl_tool.md "
        "says more."
    )
    return "\n".join([*lines, "", advice])


def _type_name(kind: type[Action], name: str) -> str:
    """The type of a parameter in words, such as `INTEGER`, `constant|linear|cosine` or `TEXT or LIST`."""
    schema = kind.model_json_schema()["properties"][name]
    choices = [branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null"]
    names = [
        "|".join(branch["enum"]) if "enum" in branch else _TYPE_NAMES.get(branch.get("type"), "VALUE")
        for branch in choices
    ]
    return " or ".join(dict.fromkeys(names)) or "VALUE"


_TYPE_NAMES = {
    "integer": "INTEGER",
    "number": "NUMBER",
    "string": "TEXT",
    "boolean": "true|false",
    "array": "LIST",
    "object": "MAPPING",
}


def _default(field: FieldInfo) -> str:
    """The default of a parameter, in brackets. A default of None is explained in the description."""
    if field.is_required():
        return "  (needed)"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or "[" in (field.description or ""):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"  [{shown}]"


def function_schema() -> dict[str, Any]:
    """The tool's schema in OpenAI's form: `action`, and the parameters of all actions except
    `PYTHON_ONLY`."""
    properties: dict[str, Any] = {
        "action": {"type": "string", "enum": list(ACTIONS), "description": "What to do."}
    }
    for action, kind in ACTIONS.items():
        for name, found in kind.model_json_schema()["properties"].items():
            if name not in PYTHON_ONLY:
                known = {key: value for key, value in found.items() if key != "title"}
                text = properties.setdefault(name, known)["description"].removesuffix(")")
                actions = f"{text}, {action})" if " (for " in text else f"{text} (for {action})"
                properties[name]["description"] = actions
    parameters = {"type": "object", "properties": properties, "required": ["action"]}
    about = "Trains, evaluates and exports a language model; loads data sets and makes rewards for that."
    return {
        "type": "function",
        "function": {"name": "rl_training", "description": about, "parameters": parameters},
    }
