"""Checks the numbers in a model's JSON files: sizes, rotary positions, stop tokens and the length of a
tokenizer."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ModelError

_SIZES = (
    "hidden_size|intermediate_size|head_dim|vocab_size|(original_)?max_position_embeddings|sliding_window"
    "|num_attention_heads|num_key_value_heads|n_head|n_embd"
)
_RANGES = (
    ("num_hidden_layers|n_layer", int, 1, 10_000, "a whole number from 1 to 10,000"),
    (_SIZES, int, 1, math.inf, "a whole number of at least 1"),
    ("max_window_layers|chunk_size_feed_forward", int, 0, math.inf, "a whole number of at least 0"),
    (".*dropout.*|.*_pdrop|.*_eps|.*_epsilon", float, 0, 1, "a number from 0 to 1"),
    ("initializer_range", float, 0, 1e3, "a number from 0 to 1,000"),
    ("rope_theta|factor|partial_rotary_factor", float, math.ulp(0), math.inf, "a number above 0"),
)
"""Rules for a config's numbers: pattern of the name, type, lowest and highest value, and wording for
messages."""
_ROPE_BASES = ("rope_theta", "rotary_emb_base")
"""Names of the number that every rotary position is computed from."""


def text_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json. Those in `text_config`, a multimodal model's language part, take
    precedence."""
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        return dict(config)
    return {**config, **text_config}


def require_rows(folder: str | Path, num_rows: Any, num_ids: int) -> None:
    """Raises ModelError if the model's embedding has fewer rows than the tokenizer has ids."""
    if isinstance(num_rows, int) and num_rows < num_ids:
        raise ModelError(
            f"{folder}: vocab_size of config.json is {num_rows:,}, and its tokenizer has ids up to "
            f"{num_ids - 1:,}; use the tokenizer that belongs to the weights"
        )


def check_sizes(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for numbers that no model can have. `file`, for messages, is the file or option that
    holds them."""
    for name, value in config.items():
        if name.startswith("rope_") and isinstance(value, dict):
            check_sizes(f"{file}: {name}", value)
        for names, kind, low, high, wording in _RANGES:
            if not re.fullmatch(names, name) or isinstance(value, list | None):
                continue
            is_number = isinstance(value, (kind, int)) and not isinstance(value, bool)  # `true` isn't 1
            if not is_number or not low <= value <= high:  # NaN is within no bounds
                raise ModelError(f"{file}: {name} is {value!r}; it must be {wording}")
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ModelError(
            f"{file}: {heads} attention heads can't share {shared} key-value heads; num_attention_heads must "
            "be a multiple of num_key_value_heads"
        )


def check_rope(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if the numbers of rotary positions are given in another form than an object, or
    without the base that they are computed from: transformers would take the architecture's default without a
    word."""
    rope = config.get("rope_parameters")
    if rope is None:
        return
    bases = "rope_theta, the number that every position is computed from"
    if not isinstance(rope, dict):
        raise ModelError(f"{file}: rope_parameters is {rope!r}; it must be an object with {bases}")
    inner = [part for part in rope.values() if isinstance(part, dict)]
    names = {name for part in (config, rope, *inner) for name in part}
    if names.isdisjoint(_ROPE_BASES):
        raise ModelError(
            f"{file}: rope_parameters is {rope!r} and names no {bases}; copy it from the model of the weights"
        )


def check_stop_tokens(file: Path, content: Mapping[str, Any], vocab_size: Any) -> None:
    """Raises ModelError if a token that ends a response isn't an id of the vocabulary, and so could never be
    sampled."""
    eos = content.get("eos_token_id")
    if eos is None:
        return
    num_ids = vocab_size if isinstance(vocab_size, int) else math.inf
    tokens = eos if isinstance(eos, list) else [eos]
    for token in tokens:
        is_number = isinstance(token, int) and not isinstance(token, bool)
        if not is_number or not 0 <= token < num_ids:
            raise ModelError(
                f"{file}: eos_token_id is {eos!r}; it must be an id of the vocabulary (vocab_size "
                f"{vocab_size}), or a list of such ids: no response could ever end with another"
            )


def check_longest_text(file: Path, content: Mapping[str, Any]) -> None:
    longest = content.get("model_max_length")
    if longest is None:
        return
    is_number = isinstance(longest, int | float) and not isinstance(longest, bool)
    if not is_number or not longest > 0:  # NaN isn't above 0
        raise ModelError(
            f"{file}: model_max_length is {longest!r}; it must be a number of tokens above 0, or left out"
        )
