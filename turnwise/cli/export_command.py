"""`turnwise export --model DIR --out DIR`: a plain Hugging Face folder of a checkpoint, with its LoRA adapter merged."""

from __future__ import annotations

import argparse

from turnwise.cli.options import free_folder
from turnwise.pipelines.interrupt import ends_at_once


def run(options: argparse.Namespace) -> int:
    """Writes the model with its tokenizer, without its training state, and describes it."""
    out = free_folder(options.out)
    # torch takes seconds to import; a folder in the way has been found by now.
    with ends_at_once():
        from turnwise.model_folder import base_of_adapter
        from turnwise.models.load import export_model, parse_dtype

    base = base_of_adapter(options.model)
    model = export_model(options.model, out, parse_dtype(options.dtype))
    origin = options.model if base is None else f"{base} with the adapter of {options.model} merged"
    print(f"{out}: {type(model).__name__}, {model.num_parameters():,} parameters in {options.dtype}; {origin}")
    return 0
