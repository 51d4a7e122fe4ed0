"""Reads a model's sizes from its config.json, without loading the model or a library of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.costs.model import BYTES
from turnwise.errors import ModelError
from turnwise.model_files.folder import base_of_adapter, check_sizes, folder_here, read_object

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last parts of the names of the linear modules in a layer of the Llama family."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-like causal language model. `num_kv_heads` and `head_dim` are set even if config.json
    omits them."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the dense model. A tied embedding counts once."""
        hidden, query, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        attention = 2 * hidden * query + 2 * hidden * kv
        attention += (query + 2 * kv) * self.has_qkv_bias + 2 * self.head_dim * self.has_qk_norm
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        embeddings = self.vocab_size * hidden * (1 if self.is_tied else 2)
        return embeddings + self.num_layers * layer + hidden

    @property
    def num_value_parameters(self) -> int:
        """Number of parameters with a scalar head (weight and bias) in place of the language-model head."""
        head = 0 if self.is_tied else self.vocab_size * self.hidden_size
        return self.num_parameters - head + self.hidden_size + 1

    def num_lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Number of parameters of LoRA adapters on the projections in `targets` (only their last parts
        count), or on `all`."""
        hidden, query, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        wide = hidden + self.intermediate_size
        sizes = {
            "q_proj": hidden + query,
            "k_proj": hidden + kv,
            "v_proj": hidden + kv,
            "o_proj": hidden + query,
        }
        sizes |= {"gate_proj": wide, "up_proj": wide, "down_proj": wide}
        ends = {target.rpartition(".")[2] for target in targets}
        return (
            rank
            * self.num_layers
            * sum(size for name, size in sizes.items() if name in ends or "all" in ends)
        )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES[dtype]


def read_model_shape(model: str) -> ModelShape | None:
    """The shape of a model, or of an adapter's base model. None if the model isn't on this machine, or its
    config.json isn't that of a Llama-like model."""
    try:
        folder = folder_here(base_of_adapter(model) or model)
        content = read_object(folder / "config.json") if folder else {}
        section = content.get("text_config") or content
        check_sizes("config.json", section)
        shape = _shape(section)
        # A list or null in place of a number raises TypeError here: it is another kind of architecture.
        return (
            shape
            if min(shape.num_parameters, shape.kv_bytes_per_token("fp32"), shape.context_length) > 0
            else None
        )
    except (ModelError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None


def _shape(content: Mapping[str, Any]) -> ModelShape:
    model_type, num_heads = content["model_type"], content["num_attention_heads"]
    return ModelShape(
        architecture=model_type,
        num_layers=content["num_hidden_layers"],
        hidden_size=content["hidden_size"],
        intermediate_size=content["intermediate_size"],
        vocab_size=content["vocab_size"],
        num_heads=num_heads,
        num_kv_heads=content.get("num_key_value_heads") or num_heads,
        head_dim=content.get("head_dim") or content["hidden_size"] // num_heads,
        context_length=_context_length(content),
        is_tied=bool(content.get("tie_word_embeddings", False)),
        has_qkv_bias=bool(content.get("attention_bias", model_type == "qwen2")),
        has_qk_norm=model_type.startswith("qwen3"),
    )


def _context_length(content: Mapping[str, Any]) -> int:
    """Maximum tokens of a sequence, including a RoPE scaling that extends it."""
    length: int = content["max_position_embeddings"]
    scaling = content.get("rope_scaling") or content.get("rope_parameters") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return max(length, int(original * factor)) if original and factor else length
