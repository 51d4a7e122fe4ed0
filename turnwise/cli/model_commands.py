"""`turnwise make-model --size tiny --out DIR` makes a model with random weights, `turnwise make-model --from
FILE.gguf --out DIR` one with a GGUF file's. `turnwise export --model DIR --out DIR` writes a checkpoint as a
plain Hugging Face folder, with its LoRA adapter merged."""

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from turnwise.cli.options import free_folder
from turnwise.errors import ConfigError, counted
from turnwise.lifecycle.interrupt import ends_at_once
from turnwise.model_files.folder import base_of_adapter
from turnwise.model_files.gguf_file import check_gguf, gguf_of_package
from turnwise.play.tokenizer_text import environment_text, file_text


def export(options: argparse.Namespace) -> int:
    """Writes the model and its tokenizer without the training state, and prints what was written."""
    out = free_folder(options.out)
    with ends_at_once():  # torch takes seconds to import
        from turnwise.models.export import export_model
        from turnwise.models.load import parse_dtype

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
    _check_source(options)
    if _source_option(options) is None:
        return _make_random(options)
    return _convert(options)


_DEFAULT_SIZE = "tiny"
_DEFAULT_SEED = 0
_DEFAULT_DTYPE = "fp32"


def _source_option(options: argparse.Namespace) -> str | None:
    """The option that names a GGUF file; None if the weights are to be random."""
    if vars(options)["from"] is not None:
        return "--from"
    if options.package is not None:
        return "--package"
    return None


def _check_source(options: argparse.Namespace) -> None:
    """Raises ConfigError if two options say where the weights come from, or an option has no effect."""
    file_option = _source_option(options)
    if file_option == "--from" and options.package is not None:
        raise ConfigError("--from and --package both name a GGUF file; remove one of them")
    of_random = {
        "--size": options.size is not None,
        "--seed": options.seed is not None,
        "--text": bool(options.text),
        "--set": bool(options.set),
        "--no-merges": options.no_merges,
    }
    of_file = {"--chat-template": options.chat_template is not None, "--dtype": options.dtype is not None}
    is_set = of_file if file_option is None else of_random
    source = f"with {file_option}"
    if file_option is None:
        source = "without --from and --package"
    for option, has_value in is_set.items():
        if has_value:
            raise ConfigError(f"{option} has no effect {source}; remove it")


def _make_random(options: argparse.Namespace) -> int:
    overrides = dict(_override(text) for text in options.set)
    out = free_folder(options.out)
    with ends_at_once():
        from turnwise.models.make import make_model

    corpus = chain(environment_text(), file_text(options.text))
    seed = _DEFAULT_SEED if options.seed is None else options.seed
    made = make_model(
        options.size or _DEFAULT_SIZE,
        out,
        corpus,
        seed=seed,
        overrides=overrides,
        has_merges=not options.no_merges,
    )
    print(
        f"{made.folder}: {made.size}, {made.num_parameters:,} random parameters, {made.num_tokens} tokens in "
        "the tokenizer"
    )
    if made.scattered:
        print(_of_scattered(made.scattered), file=sys.stderr)
    return 0


def _of_scattered(scattered: Mapping[str, int]) -> str:
    """The warning about digits and letters that stand in many tokens."""
    most = max(scattered, key=lambda char: scattered[char])
    characters = counted(len(scattered), "character")
    return (
        f"warning: some words of these texts are several tokens, and {characters} of "
        f"them stand in many different ones ({most!r} in {scattered[most]}): a small model won't learn to "
        "copy such words. If it has to, use --no-merges, which makes each letter and digit a token"
    )


def _convert(options: argparse.Namespace) -> int:
    file = _gguf_file(options)
    check_gguf(file)
    out = free_folder(options.out)
    with ends_at_once():
        from turnwise.models.gguf_model import convert_gguf
        from turnwise.models.load import parse_dtype

    dtype_name = options.dtype or _DEFAULT_DTYPE
    template_file = None if options.chat_template is None else Path(options.chat_template)
    made = convert_gguf(file, out, parse_dtype(dtype_name), template_file, _show_progress)
    print(
        f"{made.folder}: {made.architecture}, {made.num_parameters:,} parameters in {dtype_name}, "
        f"{made.num_tokens:,} tokens in the tokenizer; a response ends with {' or '.join(made.end_tokens)}"
    )
    return 0


def _gguf_file(options: argparse.Namespace) -> Path:
    if options.package is not None:
        return gguf_of_package(options.package)
    return Path(vars(options)["from"])


def _show_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _override(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set got {text!r}; expected KEY=VALUE, like --set num_hidden_layers=2")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
