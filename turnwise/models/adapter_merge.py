"""Merges the adapters of a peft folder into a model: the sum computes what peft computes with the adapters
beside the model."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from turnwise.errors import ModelError, listed
from turnwise.model_files.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from turnwise.models.lora import VALUE_TASK, fingerprint_of, import_peft, may_be_base

NOT_MERGED = "can't be merged into its base model"
_INCOMPLETE = "merged without them, the model would be another; fetch or save the adapter again"


def is_value_adapter(folder: Path) -> bool:
    """Whether the adapters in a folder are for a value model. Such a folder also has the value head."""
    return bool(
        json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("task_type") == VALUE_TASK
    )


def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Adds the adapters of a peft folder to the model's own weights, in place. A value model also gets the
    folder's head. If embedding and vocabulary projection are one tensor, and the adapters make them differ,
    they become two tensors.

    Raises ModelError if the folder was trained on other weights, lacks tensors or has tensors for other
    modules; NotAvailableError without peft. peft raises what it likes for a folder that doesn't fit the
    model."""
    peft = import_peft()
    if not may_be_base(folder, fingerprint_of(model)):
        raise ModelError(
            f"{folder}: {NOT_MERGED}: the weights there aren't those that the adapter was trained on; "
            f"restore them, or write where they are into base_model_name_or_path of {folder / ADAPTER_CONFIG}"
        )
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    _check_vocabulary(model, folder, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    base = {id(parameter) for parameter in model.parameters()}
    wrapped = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    added = [name for name, parameter in wrapped.named_parameters() if id(parameter) not in base]
    _check_tensors(
        folder,
        wrapped.peft_config["default"],
        peft.set_peft_model_state_dict(wrapped, tensors),
        added,
    )
    is_split = is_tied and (
        model.get_input_embeddings() is not embedding or model.get_output_embeddings() is not head
    )
    if is_split:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
    wrapped.merge_and_unload(safe_merge=True)
    if is_split:
        _say_whether_tied(model)
    model.requires_grad_(True)


def _check_tensors(
    folder: Path,
    config: Any,
    report: Any,
    added: Collection[str],
) -> None:
    """Raises ModelError if the folder lacks one of the tensors that its config has `added` to the model, or a
    trained bias, or holds tensors for modules that the model doesn't have. `report` is what torch says after
    loading."""
    if report.unexpected_keys:
        raise ModelError(
            f"{folder}: {NOT_MERGED}: it holds {len(report.unexpected_keys)} tensors that have no place "
            f"there ({listed(sorted(report.unexpected_keys))}); {_INCOMPLETE}, or name the base model that "
            "it was trained on"
        )
    biases = {"none": (), "all": (".bias",), "lora_only": (".base_layer.bias",)}[config.bias]
    trained = [name for name in report.missing_keys if name in added or name.endswith(biases)]
    if trained:
        raise ModelError(
            f"{folder}: {NOT_MERGED}: its weights lack {len(trained)} tensors that {ADAPTER_CONFIG} says "
            f"were trained ({listed(sorted(trained))}); {_INCOMPLETE}"
        )


def _check_vocabulary(model: PreTrainedModel, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ModelError if the adapter was trained after the vocabulary was extended: the base model hasn't
    the new rows."""
    embedding = model.get_input_embeddings()
    rows = embedding.num_embeddings
    head = model.get_output_embeddings()
    names = {
        name
        for name, module in model.named_modules()
        if module is embedding or (head is not None and module is head)
    }
    for name, shape in shapes.items():
        module = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".base_layer")
        if module in names and shape[0] != rows:
            raise ModelError(
                f"{folder}: {NOT_MERGED}: {module} has {shape[0]:,} rows in the adapter and {rows:,} in the "
                "base model: the vocabulary was changed before the adapter was trained. Do the same to the "
                f"base model (resize_token_embeddings({shape[0]})), save it with the adapter's tokenizer, "
                f"and write its folder into base_model_name_or_path of {folder / ADAPTER_CONFIG}"
            )


@torch.no_grad()
def _say_whether_tied(model: PreTrainedModel) -> None:
    """Makes embedding and vocabulary projection one tensor again if the adapters have left them equal. Writes
    into the config whether they are one."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = torch.equal(embedding.weight, head.weight)
    if is_tied:
        head.weight = embedding.weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied
