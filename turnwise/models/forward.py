"""Forward passes of a causal language model over a packed `Batch`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import NotAvailableError
from turnwise.models.logprobs import token_logprobs
from turnwise.models.packed_attention import PACKED_ATTENTION, PackedSequences
from turnwise.protocols import Output
from turnwise.types import Batch, ModelOutputs

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8


class PolicyForward:
    """Log-probs and entropies of the trained tokens of a batch of tensors, 0 elsewhere. The model is in evaluation mode.

    Packed where the model's attention can keep sequences apart, else padded: the numbers are the same. The vocabulary
    projection runs on trained tokens only, and without keeping [N, V] unless the architecture does something to its logits.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self.is_packed = model.config._attn_implementation in (PACKED_ATTENTION, "flash_attention_2")

    @cached_property
    def has_plain_head(self) -> bool:
        """Whether logits = hidden · weightᵀ, without a bias, a scale or a cap. Asked of the model itself, once."""
        is_plain = _has_plain_head(self.model)
        if not is_plain:
            logger.warning("%s changes its logits after the projection: they are kept whole", type(self.model).__name__)
        return is_plain

    def __call__(self, batch: Batch, outputs: Set[Output]) -> ModelOutputs:
        """Tensors [N] aligned with the tokens of `batch`.

        Raises:
            NotAvailableError: `values` are asked for.
        """
        if "values" in outputs:
            raise NotAvailableError(
                "values need a critic, which this version doesn't have; choose an adv_estimator without one"
            )
        trained = batch.response_mask.nonzero().squeeze(-1)
        with_entropy = "entropy" in outputs
        if self.has_plain_head:
            hidden = self._states(batch, with_logits=False).index_select(0, trained - 1)
            weight = self.model.get_output_embeddings().weight
            logprobs, entropy = token_logprobs(hidden, weight, batch.token_ids[trained], self.temperature, with_entropy)
        else:
            logits = self._states(batch, with_logits=True).index_select(0, trained - 1)
            logprobs, entropy = _logprobs_of(logits, batch.token_ids[trained], self.temperature, with_entropy)
        aligned = [None if x is None else x.new_zeros(batch.num_tokens).index_copy(0, trained, x) for x in (logprobs, entropy)]
        return ModelOutputs(logprobs=aligned[0], entropy=aligned[1])

    def _states(self, batch: Batch, with_logits: bool) -> Tensor:
        """Last hidden states [N, H], or logits [N, V]."""
        return self._packed(batch, with_logits) if self.is_packed else self._padded(batch, with_logits)

    def _packed(self, batch: Batch, with_logits: bool) -> Tensor:
        device = batch.token_ids.device
        sequences = PackedSequences.of(batch.lengths, device)
        inputs = {"input_ids": batch.token_ids[None], "position_ids": batch.position_ids[None]}
        if self.model.config._attn_implementation == PACKED_ATTENTION:
            # A mask of four dimensions is handed on as it is, so that none is built: this one is never read.
            inputs |= {"attention_mask": torch.empty(1, 1, 0, 0, device=device), "sequences": sequences}
        else:
            longest = max(batch.lengths)
            inputs |= {"cu_seq_lens_q": sequences.boundaries, "cu_seq_lens_k": sequences.boundaries}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        return _run(self.model, inputs, with_logits)[0]

    def _padded(self, batch: Batch, with_logits: bool) -> Tensor:
        """Padded on the right, where causal attention keeps padding out of sight."""
        token_ids = torch.nn.utils.rnn.pad_sequence(batch.token_ids.split(batch.lengths), batch_first=True)
        position = torch.arange(token_ids.shape[1], device=token_ids.device)
        is_token = position < torch.tensor(batch.lengths, device=token_ids.device)[:, None]
        return _run(self.model, {"input_ids": token_ids, "attention_mask": is_token.long()}, with_logits)[is_token]


def _run(model: PreTrainedModel, inputs: Mapping[str, object], with_logits: bool) -> Tensor:
    if with_logits:
        return model(**inputs, use_cache=False).logits
    return model.base_model(**inputs, use_cache=False).last_hidden_state


def _logprobs_of(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel) -> bool:
    weight = model.get_output_embeddings().weight
    inputs = {"input_ids": torch.arange(_PROBE_TOKENS, device=weight.device)[None] % len(weight)}
    logits, hidden = _run(model, inputs, True), _run(model, inputs, False)
    return torch.allclose(logits, hidden @ weight.T, rtol=1e-3, atol=1e-3)
