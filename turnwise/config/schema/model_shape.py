"""Reads a model's sizes from its config.json, without loading the model or a library of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.costs.model import BYTES
from turnwise.errors import ModelError
from turnwise.model_files.folder import base_of_adapter, folder_here, read_object
from turnwise.model_files.sizes import check_sizes

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
    def query_size(self) -> int:
        """Numbers of a token's queries, those of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys, or of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the dense model. A tied embedding counts once."""
        hidden = self.hidden_size
        attention = 2 * hidden * self.query_size + 2 * hidden * self.kv_size
        if self.has_qkv_bias:
            attention += self.query_size + 2 * self.kv_size
        if self.has_qk_norm:
            attention += 2 * self.head_dim
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        embeddings = self.vocab_size * hidden
        if not self.is_tied:
            embeddings *= 2
        return embeddings + self.num_layers * layer + hidden

    @property
    def num_value_parameters(self) -> int:
        """Number of parameters with a scalar head (weight and bias) in place of the language-model head."""
        backbone = self.num_parameters
        if not self.is_tied:
            backbone -= self.vocab_size * self.hidden_size
        return backbone + self.hidden_size + 1

    def num_lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Number of parameters of LoRA adapters on the projections in `targets` (only their last parts
        count), or on `all`."""
        outputs = {
            "q_proj": self.query_size,
            "k_proj": self.kv_size,
            "v_proj": self.kv_size,
            "o_proj": self.query_size,
            "gate_proj": self.intermediate_size,
            "up_proj": self.intermediate_size,
            "down_proj": self.intermediate_size,
        }
        names = {target.rpartition(".")[2] for target in targets}
        if "all" in names:
            names = set(outputs)
        sizes = [self.hidden_size + size for name, size in outputs.items() if name in names]
        return rank * self.num_layers * sum(sizes)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.kv_size * BYTES[dtype]


def read_model_shape(model: str) -> ModelShape | None:
    """The shape of a model, or of an adapter's base model. None if the model isn't on this machine, or its
    config.json isn't that of a Llama-like model."""
    try:
        folder = folder_here(base_of_adapter(model) or model)
        if folder is None:
            return None
        content = read_object(folder / "config.json")
        section = content.get("text_config") or content
        check_sizes("config.json", section)
        shape = _shape(section)
        # A list or null in place of a number raises TypeError here: it is another kind of architecture.
        smallest = min(shape.num_parameters, shape.kv_bytes_per_token("fp32"), shape.context_length)
    except (ModelError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None
    return shape if smallest > 0 else None


def _shape(content: Mapping[str, Any]) -> ModelShape:
    model_type = content["model_type"]
    num_heads = content["num_attention_heads"]
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
    original = scaling.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    if not original or not factor:
        return length
    return max(length, int(original * factor))
