"""Compares the model that is built of Megatron's layers with that of transformers, before a run begins."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.models.slices import SlicedModel
from turnwise.models.value_head import value_head
from turnwise.runtime.rank import RankContext
from turnwise.training.megatron.groups import tensor_parts
from turnwise.training.megatron.model import DecoderPart
from turnwise.training.megatron.schedule import run_schedule
from turnwise.training.ranks import Ranks

logger = logging.getLogger(__name__)

NUM_TOKENS = 8
MAX_DIFFERENCE = 1e-3
"""Greatest difference of two logits in fp32. Logits whose standard deviation is below 1, as a new model has
them, may differ by as much less."""
_STRIDE = 7919
"""A prime number, so that the tokens are far from each other in the vocabulary."""


def compared_tokens(vocab_size: int) -> Tensor:
    """int64 [8], the tokens of one sequence."""
    return (torch.arange(NUM_TOKENS) * _STRIDE + 1) % vocab_size


@torch.no_grad()
def reference_of(model: PreTrainedModel, slices: SlicedModel | None) -> Tensor:
    """What transformers computes of `compared_tokens` in fp32 on the CPU: logits [8, V], or the hidden states
    [8, H] of a value model, whose head may be all zeros. If the model's weights are in `slices`, each is read
    when it is used, so no more than one of them is in memory."""
    model.set_attn_implementation("sdpa")  # flash attention doesn't compute on a CPU, or in fp32
    token_ids = compared_tokens(model.get_input_embeddings().weight.shape[0])[None]
    if slices is None:
        return _outputs(model, token_ids)
    with slices.read_in_turn():
        return _outputs(model, token_ids)


def _outputs(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    outputs: Tensor
    if value_head(model) is None:
        outputs = model(input_ids=token_ids, use_cache=False).logits
    else:
        outputs = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    return outputs[0].float()


@torch.no_grad()
def require_same_outputs(
    parts: Sequence[DecoderPart],
    num_batches: int,
    reference: Tensor | None,
    rank: RankContext,
    ranks: Ranks,
) -> None:
    """Raises ModelError on all ranks if the model differs from the `reference`, which the rank that answers
    has. All ranks must call this; `num_batches` is as many as their schedule needs."""
    device = parts[0].frequencies.device
    token_ids = compared_tokens(parts[0].described.vocab_size).to(device)
    with _exact_products():
        results = run_schedule(
            parts,
            [token_ids] * num_batches,
            lambda part, tokens: part.compared(tokens),
            lambda _, computed: (torch.zeros(()), computed["compared"]),
            is_forward_only=True,
        )
    sentence = ""
    if results:  # on the last stage
        outputs = _whole_outputs(results[0], parts[-1])
        if reference is not None:
            sentence = difference(outputs, reference)
    for of_rank in ranks.gather(sentence):
        if of_rank:
            raise ModelError(f"{rank.role}: {of_rank}")
    if reference is not None:
        logger.info(
            "%s: Megatron's model computes what transformers' does (%d tokens)", rank.role, NUM_TOKENS
        )


@contextmanager
def _exact_products() -> Iterator[None]:
    """In this context matrices of fp32 aren't rounded to TF32, which containers for GPUs may turn on."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _whole_outputs(outputs: Tensor, part: DecoderPart) -> Tensor:
    """On the CPU, the logits of all tensor-parallel ranks."""
    if not part.described.is_value_model:
        outputs = torch.cat(tensor_parts(outputs), -1)[:, : part.described.vocab_size]
    return outputs.cpu()


def difference(outputs: Tensor, reference: Tensor) -> str:
    """A sentence if two tensors [8, …] differ; empty if they are alike."""
    allowed = MAX_DIFFERENCE * min(1.0, float(reference.std()))
    differences = (outputs - reference).abs().amax(-1)
    is_other = ~(differences <= allowed)  # NaN too
    if not is_other.any():
        return ""
    first = int(is_other.nonzero()[0, 0])
    parts = "weights, norms, activation or head"
    if first:
        parts = "attention or positions (rope_parameters), since the first token agrees"
    return (
        f"the model of Megatron's layers isn't that of transformers: max |Δ| {float(differences.max()):.1e} "
        f"at {len(reference)} tokens, at most {allowed:.1e} in fp32. It begins at token {first + 1}, so look "
        f"at {parts}. Compare config.json and the file of weights with those that were published, or use "
        "fsdp2_train, which runs transformers' own model (fsdp2_infer for a frozen one)"
    )
