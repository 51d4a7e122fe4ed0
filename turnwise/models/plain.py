"""Log-probs by transformers' own forward pass over one context at a time, as a reference for faster ways."""

from collections.abc import Iterable, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from turnwise.errors import ModelError
from turnwise.models.logprobs import RaggedIds, logprobs_of
from turnwise.types import FloatArray, Sample


def plain_model(
    config: PreTrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """A new model with copies of `weights`, in `dtype`, on the weights' device. Raises ModelError if a weight
    doesn't fit."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            deepcopy(config),
            dtype=dtype,
            attn_implementation="sdpa",
        ).eval()
    parameters = dict(model.named_parameters())
    device = model.device
    with torch.no_grad():
        for name, tensor in weights:
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise ModelError(
                    f"the trainer's tensor {name} {tuple(tensor.shape)} doesn't fit a plain model of its "
                    "config"
                )
            parameters[name].copy_(tensor)
            device = tensor.device
    return model.to(device)


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> list[FloatArray]:
    """Log-probs [N] of each sample's tokens at a temperature, 0 for the first token. If a token has kept ids
    (truncated sampling), its log-prob is over these ids only. Raises ModelError if the model's vocabulary
    lacks a token id."""
    results = []
    for sample in samples:
        if sample.token_ids.max() >= model.config.vocab_size:
            raise ModelError(
                f"token id {sample.token_ids.max()} is beyond a vocabulary of {model.config.vocab_size}"
            )
        token_ids = torch.from_numpy(sample.token_ids).to(model.device)
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        kept_ids = None
        if sample.kept_ids is not None and sample.kept_offsets is not None:
            # The first token has no kept ids, since it isn't sampled.
            counts = np.diff(sample.kept_offsets)[1:]
            kept_ids = RaggedIds(
                ids=torch.from_numpy(sample.kept_ids.astype(np.int64)).to(model.device),
                counts=torch.from_numpy(counts.astype(np.int64)).to(model.device),
            )
        result = logprobs_of(logits, token_ids[1:], temperature, kept_ids=kept_ids)
        logprobs = result.full if result.truncated is None else result.truncated
        results.append(np.append(np.float32(0.0), logprobs.cpu().numpy()))
    return results
