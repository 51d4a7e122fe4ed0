"""Writes a model, checkpoint or adapter as a plain Hugging Face folder."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from turnwise.model_files.folder import NOTHING, base_of_adapter, needs_export
from turnwise.models.consolidate import write_plain_weights, write_settings
from turnwise.models.load import (
    load_model,
    load_model_config,
    load_tokenizer,
    save_model,
    told_as_one_sentence,
    written_whole,
)
from turnwise.models.shares import Shares
from turnwise.runtime.disk import writing
from turnwise.runtime.replaceable import require_replaceable


def export_model(path: str | Path, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Writes a model, checkpoint or adapter as a plain Hugging Face folder with its tokenizer: an adapter is
    merged in, shares are put together file by file, and the state of training is left out. Returns the model,
    without weights if it was put together. Raises ModelError if there is no model at `path`."""
    source = NOTHING.folder(path)
    tokenizer = load_tokenizer(path)
    if base_of_adapter(source) is not None or not needs_export(source):
        model = load_model(path, dtype=dtype)
        save_model(model, tokenizer, folder)
        return model
    shares = Shares(source)
    config = load_model_config(path)
    config.dtype = dtype
    with told_as_one_sentence(path, "can't be made"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        shares.require(name, parameter.shape)
    require_replaceable(folder, "the model's folder")
    with writing(folder), written_whole(folder) as partial:
        write_settings(model, partial)
        write_plain_weights(shares, partial, dtype=dtype)
        tokenizer.save_pretrained(partial, save_jinja_files=False)
    return model
