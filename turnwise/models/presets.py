"""The sizes that `make-model` knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ModelError, nearest


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """One size: a Hugging Face `model_type`, its config fields and its vocabulary.

    `vocab_size` bounds the tokenizer. The embedding has as many rows as the trained tokenizer has tokens, or, where
    `keeps_vocab_size` is set, exactly `vocab_size` rows as the published model has.
    """

    model_type: str
    config: Mapping[str, Any]
    vocab_size: int
    keeps_vocab_size: bool = False


PRESETS: dict[str, ModelPreset] = {
    "tiny": ModelPreset(
        "qwen3",
        {
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 384,
            "max_position_embeddings": 4096,
            # The usual 0.02 leaves a small model's logits flat, so its attention learns several times more slowly.
            "initializer_range": 0.06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "tie_word_embeddings": True,
        },
        vocab_size=512,
    ),
    "small": ModelPreset(
        "qwen3",
        {
            "num_hidden_layers": 8,
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        vocab_size=1024,
    ),
    "qwen2.5-0.5b": ModelPreset(
        "qwen2",
        {
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
        },
        vocab_size=151_936,
        keeps_vocab_size=True,
    ),
    "qwen3-0.6b": ModelPreset(
        "qwen3",
        {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
        },
        vocab_size=151_936,
        keeps_vocab_size=True,
    ),
}


def preset(size: str) -> ModelPreset:
    """The preset of that name.

    Raises:
        ModelError: there is no such preset.
    """
    if size not in PRESETS:
        raise ModelError(f"model size {size!r} is unknown; sizes are {', '.join(PRESETS)}.{nearest(size, PRESETS)}")
    return PRESETS[size]
