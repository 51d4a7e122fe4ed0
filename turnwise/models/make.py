"""Writes a complete Hugging Face model folder with random weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from turnwise.errors import ModelError, nearest
from turnwise.model_files.sizes import check_sizes
from turnwise.models.load import save_model, told_as_one_sentence
from turnwise.models.presets import ModelPreset, preset
from turnwise.models.tokenizer import scattered_characters, train_tokenizer
from turnwise.types import derive_seed

# Config fields that `overrides` may not set.
_MADE_HERE = (
    *(
        "architectures",
        "model_type",
        "dtype",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "problem_type",
        "id2label",
        "label2id",
        "is_encoder_decoder",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The result of `make_model`."""

    folder: Path
    size: str
    num_parameters: int
    vocab_size: int
    """Number of rows of the embedding."""
    num_tokens: int
    """Number of tokens of the tokenizer, at most `vocab_size`."""
    scattered: Mapping[str, int] = field(default_factory=dict)
    """Digits and letters that stand in many tokens: see `tokenizer.scattered_characters`."""


def make_model(
    size: str,
    out: Path,
    corpus: Iterable[str],
    seed: int = 0,
    vocab_size: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    has_merges: bool = True,
) -> ModelSummary:
    """Makes a model of a preset size and a tokenizer trained on `corpus`, and writes both to `out`.
    `vocab_size` replaces the preset's maximum number of tokens, and `overrides` replace fields of the
    preset's config. Without `has_merges`, each byte is a token. A `vocab_size` in `overrides` is the exact
    number of tokens. Equal arguments give equal bytes. Raises ModelError if the size or a config field is
    unknown, the vocabulary is too small or too large, or shapes don't fit together."""
    shape = preset(size)
    overrides = dict(overrides or {})
    check_sizes("--set", overrides)
    is_exact = "vocab_size" in overrides or (shape.keeps_vocab_size and vocab_size is None)
    num_rows = overrides.pop("vocab_size", vocab_size or shape.vocab_size)
    texts = list(corpus)
    tokenizer = train_tokenizer(texts, num_rows, is_filled=is_exact, has_merges=has_merges)
    with told_as_one_sentence("--set", "makes no model"):
        config = _config(shape, tokenizer, len(tokenizer), overrides)
    tokenizer.model_max_length = config.max_position_embeddings
    with torch.random.fork_rng(devices=[]), told_as_one_sentence("--set", "makes no model"):
        torch.manual_seed(derive_seed("make_model", seed))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(model, tokenizer, out)
    return ModelSummary(
        folder=out,
        size=size,
        num_parameters=model.num_parameters(),
        vocab_size=config.vocab_size,
        num_tokens=len(tokenizer),
        scattered=scattered_characters(tokenizer, texts),
    )


def _config(
    shape: ModelPreset,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    overrides: Mapping[str, Any],
) -> PreTrainedConfig:
    fields = {
        **shape.config,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    allowed = AutoConfig.for_model(shape.model_type, **fields).to_dict()
    for name in overrides:
        if name in _MADE_HERE:
            raise ModelError(
                f"--set {name} would have no effect: the size, the weights, the tokenizer or the use decides "
                "it"
            )
        if name not in allowed:
            raise ModelError(
                f"{name!r} isn't a field of a {shape.model_type} config.{nearest(name, allowed)}"
            )
    check_sizes("--set", {**fields, **overrides})
    return AutoConfig.for_model(shape.model_type, **{**fields, **overrides})
