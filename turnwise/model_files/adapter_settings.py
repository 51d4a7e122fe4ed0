"""Which peft adapters can be merged into their base model exactly, so that the sum computes what peft
computes with the adapter beside the model. Without torch: `turnwise config` and every load make the same
checks."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ModelError, listed

_MERGED_EXACTLY = frozenset(
    {
        # of the file
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "task_type",
        # which layers
        "target_modules",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "target_parameters",
        # how large the change is
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "fan_in_fan_out",
        # what is trained besides
        "bias",
        "lora_bias",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        # how training began
        "init_lora_weights",
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        # of other libraries
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
    }
)
"""peft drops settings that it doesn't know, so these are the ones that are right, not the ones that are
wrong."""
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "pissa")
"""Values of init_lora_weights with which peft finds the same base weights whenever it loads the adapter. With
the others it changes the base by a random, quantised or data-dependent amount."""
_BIASES = ("none", "all", "lora_only")


def check_adapter_settings(file: Path, content: Mapping[str, Any]) -> None:
    """Raises ModelError if the `content` of an adapter_config.json, `file`, isn't that of an adapter which
    merges exactly."""
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{file}: peft_type is {kind!r}, and only LoRA adapters (LORA) are merged here; if peft can "
            "merge this kind, save the merged model with peft (merge_and_unload) and name that folder, or "
            "train a LoRA adapter"
        )
    set_names = [name for name, value in content.items() if value not in (None, False, {}, [])]
    inexact = [name for name in set_names if name not in _MERGED_EXACTLY]
    if inexact:
        raise ModelError(
            f"{file}: it sets {listed(sorted(inexact))}, with which an adapter can't be merged exactly here; "
            "if peft can merge it, save the merged model with peft (merge_and_unload) and name that folder"
        )
    start = content.get("init_lora_weights")
    is_number = isinstance(start, int) and not isinstance(start, bool)  # 1 equals True
    if is_number or start not in _KEEPS_BASE:
        raise ModelError(
            f"{file}: init_lora_weights is {start!r}, which also changes the base model, and the change "
            "isn't in this folder; save the adapter as one of the original model (peft's "
            "path_initial_model_for_weight_conversion), or save the merged model (merge_and_unload) where it "
            "was trained and name that folder"
        )
    for name in ("r", "lora_alpha"):
        number = content.get(name, 1)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number < math.inf:
            raise ModelError(
                f"{file}: {name} is {number!r}; it must be a number above 0, that of the training"
            )
    bias = content.get("bias", "none")
    if bias not in _BIASES:
        raise ModelError(f"{file}: bias is {bias!r}; it must be one of {', '.join(_BIASES)}")
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        _check_pattern(f"{file}: {name}", content.get(name))


def _check_pattern(place: str, value: Any) -> None:
    """Raises ModelError unless `value` is what peft takes: names, one pattern, or nothing."""
    if value is None:
        return
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return
    if not isinstance(value, str):
        raise ModelError(f"{place} is {value!r}; it must be a list of modules' names or a pattern")
    try:
        re.compile(value)
    except re.error as error:
        raise ModelError(f"{place} is {value!r}, which isn't a pattern that can be read: {error}") from error
