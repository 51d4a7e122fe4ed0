"""The options of `fsdp2_train` and `fsdp2_infer`, as `strategy_config` names them. Config and strategy
check them here, so that both refuse them in the same words. This module imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.errors import ConfigError, nearest

DTYPES = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}
"""Name of a dtype in a config → torch's name."""
OPTIONS = (
    "reshard_after_forward",
    "param_dtype",
    "reduce_dtype",
    "offload_policy",
    "fsdp_size",
    "sync_gradients",
)
_SYNC = ("each", "last")
_PUBLISHED = {
    "wrap_policy": "each decoder layer is sharded by itself, and what is outside the layers together",
    "apply_expert_patch": "experts of a mixture are sharded with their layer",
    "apply_tiled_mlp": "a layer computes all tokens of a micro-batch at once",
    "tiled_num_shards": "a layer computes all tokens of a micro-batch at once",
}
"""Options of a published system that aren't torch's → what is done here."""


@dataclass(frozen=True, slots=True)
class Fsdp2Options:
    """What the strategy asks of torch's `fully_shard`. Dtypes have torch's names; None is torch's default."""

    reshard_after_forward: bool | int | None = None
    """Whether a layer's whole weights are freed between its forward and its backward pass. A number keeps
    them, shared out among as many ranks. torch's default frees those of layers and keeps those outside."""
    param_dtype: str | None = None
    """The dtype in which weights are gathered and computed with; their shares stay fp32."""
    reduce_dtype: str | None = None
    """The dtype in which gradients are summed over the ranks."""
    offload_policy: bool = False
    """Whether shares of weights, gradients and moments are in host memory (torch's CPUOffloadPolicy)."""
    fsdp_size: int | None = None
    """Number of ranks that share one model; groups of as many hold copies. None = all ranks."""
    sync_gradients: Literal["each", "last"] = "each"
    """After which micro-batches of an optimiser step gradients are summed over the ranks. `last` keeps the
    whole gradient on each rank until then."""

    @classmethod
    def of(cls, options: Mapping[str, Any], num_ranks: int, computes_in: str) -> "Fsdp2Options":
        """The options that a strategy_config holds. Raises ConfigError for the first one that `problems`
        finds."""
        for name, sentence in problems(options, num_ranks, computes_in):
            raise ConfigError(f"strategy_args.strategy_config.{name}: {sentence}")
        values = dict(options)
        for name in ("param_dtype", "reduce_dtype"):
            if values.get(name) is not None:
                values[name] = DTYPES[values[name]]
        return cls(**values)


def problems(
    options: Mapping[str, Any], num_ranks: int | None, computes_in: str
) -> Iterator[tuple[str, str]]:
    """`(option, sentence)` for each option that torch doesn't know, or that has a value it can't have.
    `num_ranks` is None where the number of ranks isn't known, and `computes_in` is torch's name of the dtype
    of the role's forward passes."""
    for name, value in options.items():
        sentence = _problem(name, value, num_ranks, computes_in)
        if sentence:
            yield name, sentence


def _problem(name: str, value: Any, num_ranks: int | None, computes_in: str) -> str:
    """What is wrong with one option; empty if nothing is."""
    match name:
        case "param_dtype" | "reduce_dtype":
            return _dtype_problem(name, value, computes_in)
        case "reshard_after_forward":
            if value is None or isinstance(value, bool) or _is_count(value):
                return ""
            return f"got {value!r}; it is true, false, or a number of ranks, as in torch's fully_shard"
        case "offload_policy":
            if isinstance(value, bool):
                return ""
            return f"got {value!r}; it is true (torch's CPUOffloadPolicy) or false"
        case "sync_gradients":
            if value in _SYNC:
                return ""
            return f"got {value!r}; allowed are {' and '.join(_SYNC)}"
        case "fsdp_size":
            return _size_problem(value, num_ranks)
    if name in _PUBLISHED:
        return f"it isn't in this version: {_PUBLISHED[name]}; remove it"
    return f"torch's fully_shard has no such option (it has: {', '.join(OPTIONS)}).{nearest(name, OPTIONS)}"


def _dtype_problem(name: str, value: Any, computes_in: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or value not in DTYPES:
        return f"got {value!r}; allowed are {', '.join(DTYPES)}"
    if DTYPES[value] == "float16" and computes_in != "float16":
        return (
            f"fp16 needs model_args.dtype: fp16, which scales the loss; without it small gradients are lost. "
            f"Set that, or {name}: bf16"
        )
    return ""


def _size_problem(value: Any, num_ranks: int | None) -> str:
    if value is None:
        return ""
    if not _is_count(value):
        return f"got {value!r}; it is the number of ranks that share one model, at least 1"
    if num_ranks is not None and num_ranks % value:
        return (
            f"{num_ranks} ranks can't be divided into groups of {value}; use a divisor of {num_ranks}, or "
            "leave it out for all ranks"
        )
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
