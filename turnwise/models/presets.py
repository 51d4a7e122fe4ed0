"""The sizes that `make-model` knows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import ModelError, nearest


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """One size: a Hugging Face `model_type`, its config fields and its vocabulary. The trained tokenizer has
    at most `vocab_size` tokens, and the embedding one row for each. With `keeps_vocab_size` there are exactly
    `vocab_size` of both."""

    model_type: str
    config: Mapping[str, Any]
    vocab_size: int
    keeps_vocab_size: bool = False


PRESETS = {
    name: ModelPreset(**fields)
    for name, fields in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
"""The presets of `presets.json` by name. `tiny` has a larger `initializer_range` than the usual 0.02: at 0.02
its logits would be flat, and its attention would learn several times more slowly."""


def preset(size: str) -> ModelPreset:
    """The preset of that name. Raises ModelError if there is no such preset."""
    if size not in PRESETS:
        raise ModelError(
            f"model size {size!r} is unknown; sizes are {', '.join(PRESETS)}.{nearest(size, PRESETS)}"
        )
    return PRESETS[size]
