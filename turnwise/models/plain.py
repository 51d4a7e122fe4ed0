"""Log-probs the plain way, for checking faster ones: transformers' own forward pass, a context at a time, all logits kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from turnwise.errors import ModelError
from turnwise.types import FloatArray, Sample


def plain_model(config: PreTrainedConfig, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> PreTrainedModel:
    """A model of its own with a copy of the named weights in `dtype`, on the device on which they lie.

    Raises:
        ModelError: a name or shape doesn't fit the config.
    """
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, attn_implementation="sdpa").eval()
    own = dict(model.named_parameters())
    device = model.device
    with torch.no_grad():
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(f"the trainer's tensor {name} {tuple(tensor.shape)} doesn't fit a plain model of its config")
            own[name].copy_(tensor)
            device = tensor.device
    return model.to(device)


@torch.no_grad()
def plain_logits(model: PreTrainedModel, samples: Sequence[Sample]) -> list[Tensor]:
    """For each sample the logits [R, V] in fp32 from which its R tokens under the response mask are drawn.

    Raises:
        ModelError: a token id that the model's vocabulary doesn't have.
    """
    logits = []
    for sample in samples:
        if sample.token_ids.max() >= model.config.vocab_size:
            raise ModelError(f"token id {sample.token_ids.max()} is beyond a vocabulary of {model.config.vocab_size}")
        token_ids = torch.from_numpy(sample.token_ids).to(model.device)[None]
        before = torch.from_numpy(np.flatnonzero(sample.response_mask) - 1).to(model.device)
        logits.append(model(input_ids=token_ids, use_cache=False).logits[0, before].float())
    return logits


def logprobs_at(logits: Sequence[Tensor], samples: Sequence[Sample], temperature: float) -> FloatArray:
    """Log-probs of the samples' tokens under their response masks, one sample after another."""
    parts = []
    for rows, sample in zip(logits, samples, strict=True):
        targets = torch.from_numpy(sample.token_ids[sample.response_mask]).to(rows.device)
        parts.append(torch.log_softmax(rows / temperature, -1).gather(-1, targets[:, None])[:, 0].cpu().numpy())
    return np.concatenate(parts)
