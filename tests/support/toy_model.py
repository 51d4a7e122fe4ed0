"""A causal language model or a value model of a few thousand parameters, and random samples for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.models.packed_attention import PACKED_ATTENTION
from turnwise.types import Batch, Sample, TurnSpan, VersionRun

VOCAB_SIZE = 97
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
"""The shape of model folders that tests make."""


def toy_model(
    seed: int = 0, model_type: str = "qwen3", attn_implementation: str = PACKED_ATTENTION, **config: Any
) -> PreTrainedModel:
    """Two layers with grouped attention, random weights large enough that outputs differ visibly between
    tokens."""
    return _random_model(AutoModelForCausalLM, seed, model_type, attn_implementation, config)


def toy_value_model(
    seed: int = 0, model_type: str = "qwen3", attn_implementation: str = PACKED_ATTENTION, **config: Any
) -> PreTrainedModel:
    """The toy model with a random scalar head in the place of the language-model head."""
    return _random_model(
        AutoModelForTokenClassification, seed, model_type, attn_implementation, {"num_labels": 1, **config}
    )


def _random_model(
    kind: type[AutoModelForCausalLM] | type[AutoModelForTokenClassification],
    seed: int,
    model_type: str,
    attn_implementation: str,
    config: Mapping[str, Any],
) -> PreTrainedModel:
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(
            AutoConfig.for_model(model_type, **{**fields, **config}),
            dtype=torch.float32,
            attn_implementation=attn_implementation,
        ).eval()


def add_noise(model: PreTrainedModel, size: float = 0.05) -> None:
    """Adds the same noise to all trained parameters at each call: adapters then have learnt something, since
    B isn't 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


def toy_samples(num_samples: int, seed: int = 0, max_length: int = 40) -> list[Sample]:
    """Samples of two turns with random tokens, lengths and weights."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        length = int(rng.integers(12, max_length))
        spans = (TurnSpan(0, 4, 7), TurnSpan(1, 9, length))
        mask = np.zeros(length, np.bool_)
        for span in spans:
            mask[span.start : span.stop] = True
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCAB_SIZE, length),
                response_mask=mask,
                rollout_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
                turn_spans=spans,
                versions=tuple((VersionRun(0, span.stop - span.start),) for span in spans),
                weight=float(rng.choice([0.5, 1.0])),
            )
        )
    return samples


def with_kept_ids(samples: Sequence[Sample], number: int) -> list[Sample]:
    """The samples as if sampling had kept `number` ids at each of their trained tokens, itself first."""
    steps = np.arange(number)
    kept: list[Sample] = []
    for sample in samples:
        counts = np.where(sample.response_mask, number, 0)
        tokens = sample.token_ids[sample.response_mask]
        ids = (tokens[:, None] + steps) % VOCAB_SIZE
        offsets = np.concatenate([[0], counts.cumsum()])
        kept.append(replace(sample, kept_ids=ids.astype(np.int32).ravel(), kept_offsets=offsets))
    return kept


def toy_batches(samples: Sequence[Sample], parts: Sequence[Sequence[int]] | None = None) -> list[Batch]:
    """The samples as micro-batches of one optimiser step: all in one, or as `parts` lists their indices."""
    step = denominators(samples, max_length=256)
    return [pack([samples[index] for index in part], step) for part in parts or [range(len(samples))]]
