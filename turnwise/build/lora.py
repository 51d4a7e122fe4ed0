"""Chooses what is trained: LoRA adapters put into the model, or its own parameters except frozen ones."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnwise.config.roles import ModelArgs
from turnwise.model_folder import base_of_adapter
from turnwise.models.freeze import freeze
from turnwise.models.load import save_model
from turnwise.models.lora import ALL_LINEAR, Adapters, LoRASettings
from turnwise.models.value_head import value_head

logger = logging.getLogger(__name__)


def prepare_training(
    arguments: ModelArgs, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, seed: int
) -> Adapters | None:
    """If `lora_rank` is set, puts adapters into a freshly loaded model and returns them; else freezes what
    `freeze_module_prefix` names. `folder` is the run's.

    Raises:
        ConfigError: a name that isn't in the model, or nothing is left to be trained.
        NotAvailableError: peft isn't installed.
    """
    frozen = tuple(arguments.freeze_module_prefix or ())
    if arguments.lora_rank is None or arguments.lora_alpha is None:
        freeze(model, frozen)
        return None
    settings = LoRASettings(
        rank=arguments.lora_rank,
        alpha=arguments.lora_alpha,
        dropout=arguments.lora_dropout,
        targets=tuple(arguments.lora_target or (ALL_LINEAR,)),
        frozen=frozen,
        seed=seed,
    )
    head = value_head(model)
    kept = folder / ("base_model" if head is None else "base_critic")
    return Adapters(model, settings, _base_model(arguments.model_name_or_path, model, tokenizer, kept), head)


def _base_model(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept: Path) -> str:
    """Folder of the model that training starts from. A model with an adapter is merged and written to `kept`, in the run's
    folder, since peft puts adapters onto plain models only."""
    if base_of_adapter(path) is None:
        return str(Path(path).resolve()) if Path(path).is_dir() else path
    merged = kept.resolve()
    if not merged.is_dir():
        save_model(model, tokenizer, merged)
    logger.info("%s is an adapter: new adapters are put onto the merged model, which is in %s", path, merged)
    return str(merged)
