"""What stands before a strategy of Megatron's: its kernels, the Hugging Face model, and the parts of it that
this rank builds."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import NotAvailableError
from turnwise.models.slices import SlicedModel
from turnwise.models.value_head import value_head
from turnwise.runtime.rank import RankContext
from turnwise.spec.megatron_options import NO_KERNELS, MegatronOptions, no_context
from turnwise.training.megatron import groups
from turnwise.training.megatron.architecture import rotary_frequencies, transformer_config
from turnwise.training.megatron.model import Decoder, DecoderPart
from turnwise.training.model_source import ModelSource
from turnwise.training.settings import StrategySettings

Read = Callable[[str], Tensor]
"""The whole tensor of a name in the Hugging Face model."""


class OpenedModel(NamedTuple):
    """A Hugging Face model, which needn't have weights, and what reads its tensors."""

    model: PreTrainedModel
    read: Read
    slices: SlicedModel | None
    """None if the model has its weights."""


def open_model(source: ModelSource, rank: RankContext, is_trained: bool) -> OpenedModel:
    """The model of a source."""
    slices = source.load_slices()
    if slices is None:
        model = source.load(replace(rank, device="cpu"))
        if is_trained:
            source.prepare(model, rank)
        return OpenedModel(model, model.state_dict().__getitem__, None)
    if is_trained:
        with slices.standing_in():
            source.prepare(slices.model, rank)
    shapes = {name: parameter.shape for name, parameter in slices.model.named_parameters()}
    opened = slices

    def read(name: str) -> Tensor:
        shape = shapes[name]
        return opened.rows(opened.names[name], 0, shape[0], shape)

    return OpenedModel(slices.model, read, slices)


def build_parts(
    model: PreTrainedModel,
    options: MegatronOptions,
    strategy_config: Mapping[str, Any],
    settings: StrategySettings,
    device: torch.device,
) -> list[DecoderPart]:
    """The parts of the model on this rank: one, or as many as an interleaved schedule needs. Their weights
    aren't set."""

    recomputes = settings.is_trained and settings.is_gradient_checkpointing
    config = transformer_config(model.config, options, strategy_config, recomputes)
    head = value_head(model)
    decoder = Decoder(
        vocab_size=model.get_input_embeddings().weight.shape[0],
        frequencies=rotary_frequencies(model),
        is_tied=head is None and model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        is_value_model=head is not None,
        has_value_bias=head is not None and head.bias is not None,
        padding_id=model.get_input_embeddings().padding_idx,
        temperature=settings.temperature,
        packs_kernels=device.type == "cuda",
    )
    num_stages, stage = groups.stage_rank()
    parts: list[DecoderPart] = []
    for number in range(options.vp or 1):
        part = DecoderPart(
            config,
            decoder,
            pre_process=stage == 0 and number == 0,
            post_process=stage == num_stages - 1 and number == (options.vp or 1) - 1,
            vp_stage=None if options.vp is None else number,
        )
        parts.append(part.to(device).eval())
    return parts


def require_kernels(device: torch.device, options: MegatronOptions) -> None:
    """Raises NotAvailableError if the device is a GPU and TransformerEngine is missing, or if it isn't one
    and several ranks share the tokens of a sample."""
    if device.type == "cuda" and find_spec("transformer_engine") is None:
        raise NotAvailableError(NO_KERNELS)
    if device.type != "cuda" and options.cp > 1:
        raise NotAvailableError(
            f"strategy_args.strategy_config.context_parallel_size: {no_context(options.cp)}"
        )
