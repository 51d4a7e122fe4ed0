"""The options of `megatron_train` and `megatron_infer`, as `strategy_config` names them. Config and strategy
check them here, so that both refuse them in the same words. This module imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from turnwise.errors import ConfigError, counted, nearest

ALIASES = {
    "tensor_model_parallel_size": ("tp_size", "tensor_parallel_size"),
    "pipeline_model_parallel_size": ("pp_size", "pipeline_parallel_size"),
    "context_parallel_size": ("cp_size",),
}
"""A size of Megatron's → its names in other engines."""
PASSED = (
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "num_microbatches_with_partial_activation_checkpoints",
    "microbatch_group_size_per_vp_stage",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "deallocate_pipeline_outputs",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "attention_softmax_in_fp32",
    "attention_backend",
    "deterministic_mode",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "tp_comm_overlap",
)
"""Options that go to Megatron's `TransformerConfig` under their own names. Its other fields follow from the
model's config.json or from other settings of the run."""
OPTIONS = (
    *ALIASES,
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
    *PASSED,
)
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type`s whose weights have a bridge."""
NO_KERNELS = (
    "Megatron's packed attention on a GPU is that of TransformerEngine, which isn't installed; "
    "install its package transformer-engine[pytorch] for your CUDA, or use fsdp2_train or "
    "deepspeed_train"
)
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe")
_MIN_INTERLEAVED = 3
_GRANULARITIES = (None, "full", "selective")


class Shape(NamedTuple):
    """What of a model's config.json the parallel sizes must divide."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    model_type: str


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """What a strategy_config asks of Megatron."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int | None = None
    """Number of parts of the model that each pipeline stage holds; None = 1, without an interleaved
    schedule."""
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    recompute_granularity: str | None = None
    passed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TransformerConfig`, by their names."""

    @property
    def sizes(self) -> tuple[int, int, int | None, int]:
        """By which a process's groups are made."""
        return self.tp, self.pp, self.vp, self.cp

    @property
    def recomputes(self) -> bool:
        return self.recompute_granularity is not None

    @classmethod
    def of(cls, options: Mapping[str, Any], num_ranks: int) -> "MegatronOptions":
        """The options that a strategy_config holds. Raises ConfigError for the first one that `problems`
        finds."""
        for name, sentence in problems(options, num_ranks):
            raise ConfigError(f"strategy_args.strategy_config.{name}: {sentence}")
        return cls(
            tp=size(options, "tensor_model_parallel_size"),
            pp=size(options, "pipeline_model_parallel_size"),
            cp=size(options, "context_parallel_size"),
            vp=_virtual(options),
            sequence_parallel=options.get("sequence_parallel", False),
            use_distributed_optimizer=options.get("use_distributed_optimizer", True),
            recompute_granularity=options.get("recompute_granularity"),
            passed={name: value for name, value in options.items() if name in PASSED},
        )


def size(options: Mapping[str, Any], name: str) -> int:
    """A parallel size under any of its names; 1 if there is none."""
    for alias in (name, *ALIASES[name]):
        if alias in options:
            value: int = options[alias]
            return value
    return 1


def problems(options: Mapping[str, Any], num_ranks: int | None) -> Iterator[tuple[str, str]]:
    """`(option, sentence)` for each option that isn't one, or that has a value it can't have. `num_ranks` is
    None where the number of ranks isn't known."""
    before = 0
    for name, value in options.items():
        sentence = _problem(name, value)
        if sentence:
            before += 1
            yield name, sentence
    if before:
        return
    for name, aliases in ALIASES.items():
        names = [alias for alias in (name, *aliases) if alias in options]
        values = {options[alias] for alias in names}
        if len(values) > 1:
            pairs = " and ".join(f"{alias} {options[alias]}" for alias in names)
            yield names[-1], f"these are names of one size and differ: {pairs}; keep one"
            return
    yield from _joint_problems(options, num_ranks)


def _joint_problems(options: Mapping[str, Any], num_ranks: int | None) -> Iterator[tuple[str, str]]:
    """Problems of options, each of which is right by itself."""
    tp = size(options, "tensor_model_parallel_size")
    pp = size(options, "pipeline_model_parallel_size")
    cp = size(options, "context_parallel_size")
    if options.get("sequence_parallel") and tp == 1:
        yield (
            "sequence_parallel",
            "it divides activations among tensor-parallel ranks, and tensor_model_parallel_size is 1; "
            "remove it, or use more tensor-parallel ranks",
        )
    if _virtual(options) and pp < _MIN_INTERLEAVED:
        yield (
            "virtual_pipeline_model_parallel_size",
            f"an interleaved schedule needs at least {_MIN_INTERLEAVED} pipeline stages: between 2 of them "
            "Megatron would mix up what goes forward and what goes back. pipeline_model_parallel_size is "
            f"{pp}; remove it, or use more pipeline stages",
        )
    round_size = options.get("microbatch_group_size_per_vp_stage")
    if round_size is not None and (_virtual(options) is None or round_size < pp):
        yield (
            "microbatch_group_size_per_vp_stage",
            f"got {round_size}; an interleaved schedule (virtual_pipeline_model_parallel_size above 1) takes "
            f"micro-batches in rounds of this size, at least as many as there are pipeline stages ({pp}); "
            "rounds are filled with micro-batches of weight 0. Remove it for rounds of "
            f"{pp}, or use a larger one",
        )
    if num_ranks is not None and num_ranks % (tp * pp * cp):
        yield (
            "tensor_model_parallel_size",
            f"{counted(num_ranks, 'rank')} can't be divided into copies of the model on tensor {tp} × "
            f"pipeline {pp} × context {cp} = {tp * pp * cp} ranks each; use sizes whose product divides "
            f"{num_ranks}, or another device_mapping",
        )


def shape_problems(options: Mapping[str, Any], shape: Shape) -> Iterator[tuple[str, str]]:
    """`(option, sentence)` for each size that the model can't be divided by, and for a model without a
    bridge. The options must have no `problems`."""
    tp = size(options, "tensor_model_parallel_size")
    pp = size(options, "pipeline_model_parallel_size")
    if shape.model_type not in ARCHITECTURES:
        yield "", no_bridge(shape.model_type)
        return
    counts = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_key_value_heads,
        "neurons of a feed-forward layer": shape.intermediate_size,
    }
    for name, number in counts.items():
        if number % tp:
            yield (
                "tensor_model_parallel_size",
                f"{number} {name} can't be divided among {tp} tensor-parallel ranks; use a size that divides "
                f"{number}",
            )
    virtual = _virtual(options)
    parts = pp * (virtual or 1)
    if shape.num_layers % parts:
        stages = counted(pp, "pipeline stage")
        if virtual is not None:
            stages += f" of {virtual} parts"
        yield (
            "pipeline_model_parallel_size" if virtual is None else "virtual_pipeline_model_parallel_size",
            f"{shape.num_layers} layers can't be divided among {stages}; use sizes whose product divides "
            f"{shape.num_layers}",
        )


def no_context(size: int) -> str:
    """Why several ranks can't share the tokens of a sample on a CPU."""
    return (
        f"got {size}, and this machine has no GPU: Megatron's attention on a CPU computes whole samples, and "
        "that of TransformerEngine, which can share one among ranks, needs GPUs; use 1 here, and more "
        "tensor- or pipeline-parallel ranks"
    )


def no_bridge(model_type: str) -> str:
    """Why a model of this type isn't trained by Megatron here."""
    if model_type in _MIXTURES:
        return (
            f"a mixture of experts ({model_type}) isn't in this version of megatron_train; use fsdp2_train "
            "or deepspeed_train (fsdp2_infer for a frozen model)"
        )
    return (
        f"model type {model_type} has no bridge to Megatron's weights; those with one are "
        f"{', '.join(ARCHITECTURES)}. Use fsdp2_train or deepspeed_train (fsdp2_infer for a frozen model)"
    )


def _virtual(options: Mapping[str, Any]) -> int | None:
    value = options.get("virtual_pipeline_model_parallel_size")
    return value if value != 1 else None


def _problem(name: str, value: Any) -> str:
    """What is wrong with one option; empty if nothing is."""
    names = [alias for aliases in ALIASES.values() for alias in aliases]
    if name == "expert_model_parallel_size":
        if value == 1:
            return ""
        return f"got {value!r}; mixtures of experts aren't in this version of megatron_train; remove it"
    if name in ALIASES or name in names:
        return "" if _is_count(value) else f"got {value!r}; it is a number of ranks, at least 1"
    if name == "virtual_pipeline_model_parallel_size":
        if value is None or _is_count(value):
            return ""
        return f"got {value!r}; it is the number of parts of the model on each pipeline stage, at least 1"
    if name in ("sequence_parallel", "use_distributed_optimizer"):
        return "" if isinstance(value, bool) else f"got {value!r}; it is true or false"
    if name == "recompute_granularity":
        if value in _GRANULARITIES:
            return ""
        return f"got {value!r}; it is full or selective, or left out"
    if name == "microbatch_group_size_per_vp_stage":
        return "" if _is_count(value) else f"got {value!r}; it is a number of micro-batches, at least 1"
    if name == "max_grad_norm":
        return ""  # the run's own setting counts, which must be the same
    if name in PASSED:
        return ""
    return (
        f"Megatron has no such option here (it has: {', '.join(OPTIONS)}); the shape of the model comes from "
        f"its config.json.{nearest(name, (*OPTIONS, *names))}"
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
