"""`turnwise make-model --size tiny --out DIR` makes a model with random weights. `turnwise export --model DIR
--out DIR` writes a checkpoint as a plain Hugging Face folder, with its LoRA adapter merged."""

import argparse
import json
from itertools import chain
from typing import Any

from turnwise.cli.options import free_folder
from turnwise.errors import ConfigError
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.model_files.folder import base_of_adapter
from turnwise.play.tokenizer_text import environment_text, file_text


def export(options: argparse.Namespace) -> int:
    """Writes the model and its tokenizer without the training state, and prints what was written."""
    out = free_folder(options.out)
    with ends_at_once():  # torch takes seconds to import
        from turnwise.models.load import export_model, parse_dtype

    base = base_of_adapter(options.model)
    model = export_model(options.model, out, parse_dtype(options.dtype))
    origin = options.model
    if base is not None:
        origin = f"{base} with the adapter of {options.model} merged"
    print(
        f"{out}: {type(model).__name__}, {model.num_parameters():,} parameters in {options.dtype}; {origin}"
    )
    return 0


def make(options: argparse.Namespace) -> int:
    """Makes the model's folder, and prints what is in it."""
    overrides = dict(_override(text) for text in options.set)
    out = free_folder(options.out)
    with ends_at_once():
        from turnwise.models.make import make_model

    corpus = chain(environment_text(), file_text(options.text))
    made = make_model(options.size, out, corpus, seed=options.seed, overrides=overrides)
    print(
        f"{made.folder}: {made.size}, {made.num_parameters:,} random parameters, {made.num_tokens} tokens in "
        "the tokenizer"
    )
    return 0


def _override(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set got {text!r}; expected KEY=VALUE, like --set num_hidden_layers=2")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
