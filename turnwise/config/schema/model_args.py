"""Settings of the models of a run: their folders, training, sampling, strategies and devices."""

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from turnwise.config.schema.model_shape import ModelShape, read_model_shape
from turnwise.config.schema.section import (
    BelowOne,
    Count,
    Fraction,
    Name,
    Names,
    NonNegative,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    as_list,
    derived,
)
from turnwise.model_files.folder import Trust
from turnwise.spec import MAX_KEPT, STRATEGIES, StrategySpec
from turnwise.spec.package_tables import read_table

MAX_DEVICES = 65_536
"""Maximum number of devices that a text may name. A text with more is refused, since it must be a typo."""

_INTEGER = r"\s*(-?\d{1,9})\s*"
_RANGE = re.compile(rf"\s*(list\(\s*)?range\({_INTEGER}(?:,{_INTEGER})?(?:,{_INTEGER})?\)\s*(?(1)\)\s*)")
_LIST = re.compile(rf"\s*\[(?:{_INTEGER}(?:,{_INTEGER})*)?,?\s*\]\s*")
_FORMS = "a list of ranks such as [0, 1], or a string such as 'list(range(0, 8))' or 'list(range(0,4)) + [6]'"


def parse_devices(text: str) -> list[int]:
    """The ranks that a text names by `list(range(…))`, `[…]` or a sum of these, in order. Raises ValueError
    for other texts.

    >>> parse_devices("list(range(0, 4)) + [6]")
    [0, 1, 2, 3, 6]
    """
    ranks: list[int] = []
    for term in text.split("+"):
        ranks += _parse_term(term, text)
        if len(ranks) > MAX_DEVICES:
            raise ValueError(f"{text!r} names more than {MAX_DEVICES} devices")
    return ranks


def _parse_term(term: str, text: str) -> range | list[int]:
    match = _RANGE.fullmatch(term)
    if match:
        bounds = [int(number) for number in match.groups()[1:] if number is not None]
        if bounds[2:] != [0]:  # the step
            return range(*bounds)
    if _LIST.fullmatch(term):
        return [int(number) for number in re.findall(r"-?\d+", term)]
    raise ValueError(f"{text!r} isn't {_FORMS}")


def _devices(value: Any) -> Any:
    ranks = parse_devices(value) if isinstance(value, str) else value
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise ValueError(f"expected {_FORMS}")
    if not ranks:
        raise ValueError(f"{value!r} names no device; remove the key to use this process")
    if min(ranks) < 0:
        raise ValueError(f"device ranks start at 0, got {min(ranks)}")
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(f"device {twice[0]} is named twice")
    return ranks


DeviceRanks = Annotated[list[int], BeforeValidator(_devices)]
Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
]
Dtype = Literal["fp32", "bf16", "fp16"]
ROLES: dict[str, dict[str, Any]] = read_table(__file__, "roles.yaml")


class ModelArgs(Section):
    """The weights that a role starts from, and how they are run."""

    model_name_or_path: Name = derived()
    """Model folder or hub name [`pretrain`; `reward_pretrain` for critic and reward model]. actor_infer
    always has actor_train's."""
    model_type: Literal["causal_lm", "token_classification"] = derived()
    """The head [causal_lm; token_classification, a head with one output, for the critic and a reward
    model]."""
    dtype: Dtype = derived()
    """Dtype of the forward passes [fp32 for actor_train; actor_train's for the other roles]. Trained weights
    stay fp32."""
    attn_implementation: Literal["sdpa", "fa2", "eager", "auto"] = "auto"
    """Attention kernel; auto picks the fastest that the device supports."""
    disable_gradient_checkpointing: bool = True
    """Keep activations for the backward pass, which is faster, instead of computing them again, which takes
    less memory."""
    lora_rank: PositiveCount | None = None
    """Rank of LoRA adapters; unset = all parameters are trained."""
    lora_alpha: Positive | None = None
    """LoRA's α: adapters are scaled by α / lora_rank [2 × lora_rank]."""
    lora_dropout: BelowOne = 0.0
    """Dropout before the adapters in training passes."""
    lora_target: Names | None = None
    """Linear modules with adapters, by the last parts of their names, or `all` [all but the vocabulary
    projection]."""
    freeze_module_prefix: Names | None = None
    """Parameters whose names start with one of these are not trained."""
    trust_remote_code: bool = derived()
    """Run the Python files of the model's folder. They can do whatever you can, so read them first [false;
    actor_train's for roles with the same model]."""
    allow_pickle: bool = derived()
    """Read pickled weights (pytorch_model.bin) if there are no safetensors; they may hold nothing but plain
    tensors [false; actor_train's for roles with the same model]."""

    @property
    def shape(self) -> ModelShape | None:
        """The model's sizes, read once; None if `read_model_shape` can't read them."""
        # A model that isn't here yet is asked for again: it may have been downloaded.
        return self._shape or read_model_shape(self.model_name_or_path)

    @cached_property
    def _shape(self) -> ModelShape | None:
        return read_model_shape(self.model_name_or_path)

    @property
    def trust(self) -> Trust:
        """What may be read from the model's folder: Python code, pickled weights."""
        return Trust(self.trust_remote_code, self.allow_pickle)

    @field_validator("lora_target", mode="before")
    @classmethod
    def _all_linear(cls, targets: Any) -> Any:
        """Reads peft's `all-linear` as `all`."""
        names = as_list(targets)
        if not isinstance(names, list):
            return names
        return ["all" if name == "all-linear" else name for name in names]

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA adapters are trained instead of the model's own parameters."""
        return self.lora_rank is not None


class TrainingArgs(Section):
    """The optimiser: AdamW, its learning-rate schedule, and the number of samples per step."""

    learning_rate: Positive = derived()
    """Peak learning rate [1e-6; 1e-5 with LoRA and for SFT]."""
    per_device_train_batch_size: PositiveCount = 8
    """Samples of a micro-batch, unless micro-batches are filled by tokens (use_dynamic_batching_in_train)."""
    gradient_accumulation_steps: PositiveCount = 1
    """The samples of an optimiser step are this × per_device_train_batch_size × the number of data-parallel
    ranks."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    warmup_steps: Count = 0
    """Optimiser steps of linear warm-up."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all optimiser steps, if warmup_steps is 0."""
    lr_scheduler_type: Schedule = "constant"
    """Learning rate after the warm-up: constant, or a decay over the rest of the run."""
    adam_beta1: BelowOne = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of AdamW's second moment."""


def _one_sequence(value: int) -> int:
    if value != 1:
        raise ValueError(
            f"got {value}; a task's siblings come from `group_size` of the environment manager, so this "
            "stays 1"
        )
    return value


def _zero_for_off(value: Any) -> Any:
    if value == -1:
        return 0
    return value


class GeneratingArgs(Section):
    """How tokens are drawn."""

    max_new_tokens: PositiveCount | None = None
    """Maximum tokens per response; the smaller of this and max_tokens_per_step applies [128, at most
    sequence_length]."""
    temperature: NonNegative = 1.0
    """Divides the logits; 0 is greedy. The trainer's log-probs are at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: draws only from the likeliest tokens, as many as it takes for this total probability;
    1 = off."""
    top_k: Annotated[Count, BeforeValidator(_zero_for_off)] = 0
    """Draws only from the k likeliest tokens; 0 (or -1) = off."""
    min_p: Fraction = 0.0
    """Leaves out tokens whose probability is below this × that of the likeliest token; 0 = off."""
    num_return_sequences: Annotated[int, AfterValidator(_one_sequence)] = 1
    """Always 1: siblings come from `group_size`."""
    stop_strings: Names = Field(default_factory=list)
    """A response ends with the token that completes one of these strings."""
    repetition_penalty: Positive = 1.0
    """Divides positive logits of tokens that are in the context already, and multiplies negative ones; 1 =
    off."""
    do_sample: bool = True
    """False is greedy."""

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from another distribution than the softmax of the logits at this
        temperature."""
        drops_ids = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return drops_ids or self.repetition_penalty != 1

    @property
    def loses_ids(self) -> bool:
        """Whether sampling is truncated and servers don't return the candidate ids, so that the log-probs of
        sampler and trainer can't be compared."""
        return self.is_truncated and not self.keeps_ids

    @property
    def keeps_ids(self) -> bool:
        """Whether servers return the candidate ids that each token was drawn from
        (`SamplingParams.keeps_ids`)."""
        return 0 < self.top_k <= MAX_KEPT and self.repetition_penalty == 1


class StrategyArgs(Section):
    """The strategy that runs a role: the code or engine that trains, computes log-probs or samples."""

    strategy_name: Annotated[str, AfterValidator(OneOf(STRATEGIES))] = derived()
    """The strategy [torch_train for trained roles, torch_infer for frozen ones, embedded for actor_infer and
    a judge]."""
    strategy_config: dict[str, Any] = Field(default_factory=dict)
    """The engine's own options, passed to it unchanged (`tp_size`, `gpu_memory_utilization`, a ZeRO stage
    …)."""

    @field_validator("strategy_config")
    @classmethod
    def _whole_counts(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in STRATEGIES["embedded"].options or ():
            count = options.get(name, 1)
            is_number = isinstance(count, int) and not isinstance(count, bool)
            if not is_number or count < 1:
                raise ValueError(
                    f"{name} is {count!r}; it must be a whole number of at least 1, without quotes or "
                    "exponent"
                )
        return options

    @property
    def spec(self) -> StrategySpec:
        """What the strategy is, by its name."""
        return STRATEGIES[self.strategy_name]

    @property
    def always_packs(self) -> bool:
        """Whether the strategy always packs samples, whatever `use_sequence_packing` says."""
        return self.spec.always_packs

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a share of the trained parameters, so that no server can read them in
        place."""
        return self.spec.is_sharded

    def degree(self, *names: str) -> int:
        """The value of the first of these options in `strategy_config`; 1 if there is none, or it isn't a
        whole number > 0."""
        for name in names:
            if name in self.strategy_config:
                value = self.strategy_config[name]
                return value if isinstance(value, int) and value > 0 else 1
        return 1


class PlacedModel(Section):
    """One model, how it is trained, and the devices that hold it."""

    model_args: ModelArgs = Field(default_factory=ModelArgs)
    training_args: TrainingArgs = Field(default_factory=TrainingArgs)
    strategy_args: StrategyArgs = Field(default_factory=StrategyArgs)
    device_mapping: DeviceRanks | None = None
    """Device ranks or `list(range(0,8))` [one per launched process; critic, reference: actor_train's;
    servers: the first]."""
    max_tokens_per_microbatch_in_train: PositiveCount = derived()
    """Maximum tokens of a micro-batch with use_dynamic_batching_in_train [2 × sequence_length, at least
    4096]."""

    @property
    def tensor_parallel_size(self) -> int:
        return self.strategy_args.degree("tp_size", "tensor_parallel_size", "tensor_model_parallel_size")

    @property
    def pipeline_parallel_size(self) -> int:
        return self.strategy_args.degree("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size")

    @property
    def context_parallel_size(self) -> int:
        return self.strategy_args.degree("cp_size", "context_parallel_size")

    @property
    def model_parallel_size(self) -> int:
        """Number of devices that hold one copy of the model: tensor × pipeline × context parallel ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of copies of the model, among which a batch is divided."""
        if self.device_mapping is None:
            return 1
        return max(len(self.device_mapping) // self.model_parallel_size, 1)

    @property
    def samples_per_optimizer_step(self) -> int:
        arguments = self.training_args
        return (
            arguments.per_device_train_batch_size
            * arguments.gradient_accumulation_steps
            * self.data_parallel_size
        )


class Role(PlacedModel):
    """One model of the run, and how it is trained and sampled."""

    generating_args: GeneratingArgs = Field(default_factory=GeneratingArgs)
    use_dynamic_batching_in_train: bool = False
    """Fill micro-batches by tokens instead of by samples. Changes speed and memory, not the result."""
    use_dynamic_batching_in_infer: bool = False
    """Fill the micro-batches of forward passes (no training) by tokens instead of by samples."""
    max_tokens_per_microbatch_in_infer: PositiveCount = derived()
    """Maximum tokens of a micro-batch with use_dynamic_batching_in_infer [2 × sequence_length, at least
    4096]."""
    use_sequence_packing: bool = True
    """Concatenate the samples of a micro-batch instead of padding them."""


class ActorTrain(Role):
    """The policy that is trained."""

    model_update_frequency: PositiveCount = 1
    """The sampler gets new weights every so many steps."""
