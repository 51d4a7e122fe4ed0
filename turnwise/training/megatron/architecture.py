"""Megatron's configuration of a model, from the config.json of a Hugging Face model."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from turnwise.errors import ConfigError, ModelError
from turnwise.spec.megatron_options import (
    ARCHITECTURES,
    MegatronOptions,
    Shape,
    no_bridge,
    shape_problems,
)

_POSITIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies don't depend on the length of a sequence."""


def transformer_config(
    hf: PreTrainedConfig,
    options: MegatronOptions,
    strategy_config: Mapping[str, Any],
    recomputes: bool,
) -> TransformerConfig:
    """The configuration of the model that `hf` describes, in fp32. Raises ConfigError for sizes that don't
    divide the model, for what Megatron's layers can't compute, and for what Megatron refuses."""
    check_shape(hf, strategy_config)
    _check_layers(hf)
    granularity = options.recompute_granularity
    if granularity is None and recomputes:
        granularity = "full"
    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_size(hf),
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": has_qkv_bias(hf),
        "qk_layernorm": hf.model_type == "qwen3",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "virtual_pipeline_model_parallel_size": options.vp,
        "context_parallel_size": options.cp,
        "sequence_parallel": options.sequence_parallel,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the default asks for equal lengths, even without experts
        "use_cpu_initialization": True,
        "perform_initialization": False,
        # Else the schedule divides losses by the number of micro-batches, and ranks average gradients.
        "calculate_per_token_loss": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "recompute_granularity": granularity,
    }
    if granularity == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    try:
        return TransformerConfig(**{**settings, **options.passed})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"strategy_args.strategy_config: Megatron says: {error}") from error


def check_shape(hf: PreTrainedConfig, strategy_config: Mapping[str, Any]) -> None:
    """Raises ConfigError if the sizes in the strategy_config don't divide the model, or it has no bridge."""
    if hf.model_type not in ARCHITECTURES:
        raise ConfigError(no_bridge(hf.model_type))
    shape = Shape(
        hf.num_hidden_layers,
        hf.num_attention_heads,
        hf.num_key_value_heads,
        hf.intermediate_size,
        hf.model_type,
    )
    for name, sentence in shape_problems(strategy_config, shape):
        raise ConfigError(f"strategy_args.strategy_config.{name}: {sentence}")


def head_size(hf: PreTrainedConfig) -> int:
    """Number of dimensions of one attention head."""
    size: int = hf.to_dict().get("head_dim") or hf.hidden_size // hf.num_attention_heads
    return size


def has_qkv_bias(hf: PreTrainedConfig) -> bool:
    return hf.model_type == "qwen2"


def rotary_frequencies(model: PreTrainedModel) -> Tensor:
    """[D / 2]: by how much each pair of a head's dimensions turns from one position to the next, in radians.
    Raises ConfigError where this depends on the length of the sequence."""
    parameters = model.config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    rotary = model.base_model.rotary_emb
    if kind not in _POSITIONS or rotary.attention_scaling != 1.0:
        raise ConfigError(
            f"positions of the type {kind} aren't in this version of megatron_train (those that are: "
            f"{', '.join(_POSITIONS)}, without a scale of the attention); use fsdp2_train or deepspeed_train"
        )
    frequencies: Tensor = rotary.inv_freq
    if frequencies.is_meta:
        raise ModelError("the model has no rotary frequencies: it is on the meta device")
    return frequencies.detach().float().cpu().clone()


def _check_layers(hf: PreTrainedConfig) -> None:
    """Raises ConfigError for what a config may ask for and the layers here don't have."""
    fields = hf.to_dict()
    slides = "sliding_attention" in (fields.get("layer_types") or ())
    if hf.model_type == "mistral":
        slides = fields.get("sliding_window") is not None
    asked = {
        "attention_bias": fields.get("attention_bias") and hf.model_type != "qwen2",
        "mlp_bias": fields.get("mlp_bias"),
        "sliding_window": slides,
        f"hidden_act: {fields.get('hidden_act')}": fields.get("hidden_act") != "silu",
    }
    present = [name for name, is_asked in asked.items() if is_asked]
    if present:
        raise ConfigError(
            f"config.json has {', '.join(present)}, which isn't in this version of megatron_train; use "
            "fsdp2_train or deepspeed_train"
        )
