"""Forward passes of a policy or a value model over a packed `Batch`."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.errors import NotAvailableError
from turnwise.models.cpu.layers import use_native_layers
from turnwise.models.cpu.prefix_tree import merge_prefixes
from turnwise.models.logprobs import RaggedIds, logprobs_of, token_logprobs
from turnwise.models.packed_attention import PACKED_ATTENTION, PackedSequences
from turnwise.models.value_head import value_head
from turnwise.protocols import Output
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.types import Batch, ModelOutputs

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 8
_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config settings by which some architectures scale or cap logits; None or 1 changes nothing."""


def make_forward(
    model: PreTrainedModel,
    temperature: float = 1.0,
    use_kernels: bool = True,
) -> "PackedForward":
    """A `ValueForward` if the model has a value head, else a `PolicyForward`. With `use_kernels` the model's
    layers run on turnwise's own kernels where these fit (`use_native_layers`)."""
    if use_kernels:
        use_native_layers(model)
    head = value_head(model)
    if head is None:
        return PolicyForward(model, temperature)
    return ValueForward(model, head)


class PackedForward(ABC):
    """Computes a model's outputs at the trained tokens of a batch, and 0 at other tokens. The model is in
    evaluation mode. Sequences are packed if the model's attention can keep them apart, else padded, with the
    same results."""

    gives: ClassVar[frozenset[Output]]
    """The outputs that this class can compute."""
    reads_last: ClassVar[bool] = True
    """Whether an output may need the hidden state at the last token of a sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        attention = model.config._attn_implementation
        self._has_own_attention = attention == PACKED_ATTENTION
        self.is_packed = self._has_own_attention or attention == "flash_attention_2"
        self.counts = TokenCounts()
        """Tokens of all calls since this was last reset."""

    def __call__(self, batch: Batch, outputs: Set[Output]) -> ModelOutputs:
        """The `outputs`, tensors [N], for a batch of tensors. Raises NotAvailableError if the model can't
        give one of them."""
        unknown = outputs - self.gives
        if unknown:
            raise NotAvailableError(
                f"{type(self.model).__name__} gives {' and '.join(sorted(self.gives))}, but no "
                f"{' or '.join(sorted(unknown))}: a policy has a language-model head (model_type: "
                "causal_lm), a critic a value head (token_classification)"
            )
        trained = batch.response_mask.nonzero().squeeze(-1)
        return self.of_trained(batch, trained, outputs)

    @abstractmethod
    def of_trained(self, batch: Batch, trained: Tensor, outputs: Set[Output]) -> ModelOutputs:
        """The outputs, given the positions of the trained tokens in the batch."""

    def states(self, batch: Batch, with_logits: bool = False) -> Tensor:
        """Hidden states [N, H] after the last layer or, if `with_logits`, logits [N, V]."""
        if self.is_packed:
            return self._packed(batch, with_logits)
        return self._padded(batch, with_logits)

    def _packed(self, batch: Batch, with_logits: bool) -> Tensor:
        """Computes shared prefixes once and leaves out unread last tokens. Neither is done on a GPU, whose
        varlen kernels need whole sequences, or with media, where equal tokens may stand for different
        images."""
        device = batch.token_ids.device
        tree = None
        if self._has_own_attention and device.type == "cpu" and not batch.media:
            tree = merge_prefixes(batch.token_ids, batch.lengths, self.reads_last)
        if tree is None:
            sequences = PackedSequences.of(batch.lengths, device)
            return self._flat(batch, batch.token_ids, batch.position_ids, sequences, with_logits)
        token_ids = batch.token_ids[tree.tokens]
        position_ids = batch.position_ids[tree.tokens]
        branches = PackedSequences.along(tree)
        states = self._flat(batch, token_ids, position_ids, branches, with_logits)
        return states.index_select(0, tree.nodes)

    def _flat(
        self,
        batch: Batch,
        token_ids: Tensor,
        position_ids: Tensor,
        sequences: PackedSequences,
        with_logits: bool,
    ) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": token_ids[None], "position_ids": position_ids[None]}
        if self._has_own_attention:
            # Given a mask of four dimensions, transformers builds none. This mask is never read.
            inputs["attention_mask"] = torch.empty(1, 1, 0, 0, device=token_ids.device)
            inputs["sequences"] = sequences
        else:
            longest = max(sequences.lengths)
            inputs["cu_seq_lens_q"] = sequences.boundaries
            inputs["cu_seq_lens_k"] = sequences.boundaries
            inputs["max_length_q"] = longest
            inputs["max_length_k"] = longest
        return self._run(batch, len(token_ids), inputs, with_logits)[0]

    def _padded(self, batch: Batch, with_logits: bool) -> Tensor:
        """Pads on the right, where causal attention never sees padding."""
        sequences = batch.token_ids.split(batch.lengths)
        token_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        position = torch.arange(token_ids.shape[1], device=token_ids.device)
        lengths = torch.tensor(batch.lengths, device=token_ids.device)
        is_token = position < lengths[:, None]
        inputs = {"input_ids": token_ids, "attention_mask": is_token.long()}
        return self._run(batch, batch.num_tokens, inputs, with_logits)[is_token]

    def _run(
        self,
        batch: Batch,
        num_distinct: int,
        inputs: Mapping[str, Any],
        with_logits: bool,
    ) -> Tensor:
        counts = TokenCounts(batch.num_tokens, num_distinct, inputs["input_ids"].numel())
        self.counts = self.counts.plus(counts)
        return _run(self.model, inputs, with_logits)


class PolicyForward(PackedForward):
    """Computes log-probs of the trained tokens and entropies of their distributions, softmax(logits /
    temperature). In a batch with kept ids, `logprobs` are over the ids that each token was drawn from, and
    `full_logprobs` are over the whole vocabulary. A token with an entry above 0 in the batch's `temperatures`
    is scored at that temperature.

    The vocabulary projection runs on trained tokens only, and logits are computed a chunk at a time. If the
    architecture changes its logits, all of them [N, V] are kept in memory."""

    gives = frozenset({"logprobs", "full_logprobs", "entropy"})
    reads_last = False

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__(model)
        self.temperature = temperature
        # Tested in evaluation mode: with dropout the two passes of the test would differ.
        self.has_plain_head = _has_plain_head(model)
        if not self.has_plain_head:
            logger.warning(
                "%s changes its logits after the projection, so all are kept in memory", type(model).__name__
            )

    def of_trained(self, batch: Batch, trained: Tensor, outputs: Set[Output]) -> ModelOutputs:
        with_entropy = "entropy" in outputs
        targets = batch.token_ids[trained]
        kept_ids = kept_ids_of(batch, trained)
        temperature: float | Tensor = self.temperature
        if batch.temperatures is not None:
            of_tokens = batch.temperatures[trained]
            temperature = of_tokens.where(of_tokens > 0, temperature)
        if self.has_plain_head:
            hidden = self.states(batch).index_select(0, trained - 1)
            weight = self.model.get_output_embeddings().weight
            result = token_logprobs(hidden, weight, targets, temperature, with_entropy, kept_ids)
        else:
            logits = self.states(batch, with_logits=True).index_select(0, trained - 1)
            result = logprobs_of(logits, targets, temperature, with_entropy, kept_ids)
        full = _aligned(result.full, batch, trained)
        logprobs = full
        if result.truncated is not None:
            logprobs = _aligned(result.truncated, batch, trained)
        entropy = None
        if result.entropy is not None:
            entropy = _aligned(result.entropy, batch, trained)
        gives_full = kept_ids is not None or "full_logprobs" in outputs
        return ModelOutputs(
            logprobs=logprobs,
            full_logprobs=full if gives_full else None,
            entropy=entropy,
        )


class ValueForward(PackedForward):
    """Computes values of the states before the trained tokens, and after them (`next_values`). The head runs
    in fp32."""

    gives = frozenset({"values", "next_values"})

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__(model)
        self.head = head

    def of_trained(self, batch: Batch, trained: Tensor, outputs: Set[Output]) -> ModelOutputs:
        hidden = self.states(batch)
        positions = {"values": trained - 1, "next_values": trained}
        values = {}
        with torch.autocast(hidden.device.type, enabled=False):
            for name in outputs:
                states = hidden.index_select(0, positions[name]).float()
                values[name] = self._head_of(states).squeeze(-1)
        aligned = {name: _aligned(of_states, batch, trained) for name, of_states in values.items()}
        return ModelOutputs(**aligned)

    def _head_of(self, states: Tensor) -> Tensor:
        bias = self.head.bias
        return nn.functional.linear(states, self.head.weight.float(), None if bias is None else bias.float())


def _aligned(values: Tensor, batch: Batch, trained: Tensor) -> Tensor:
    return values.new_zeros(batch.num_tokens).index_copy(0, trained, values)


def kept_ids_of(batch: Batch, trained: Tensor) -> RaggedIds | None:
    """The ids that the tokens at these places, in ascending order, were drawn from; None if the batch has
    none."""
    if batch.kept_ids is None:
        return None
    counts = batch.kept_offsets.diff()
    is_trained = torch.zeros_like(counts, dtype=torch.bool)
    is_trained[trained] = True
    is_trained = is_trained.repeat_interleave(counts)
    return RaggedIds(batch.kept_ids[is_trained].long(), counts[trained])


def _run(model: PreTrainedModel, inputs: Mapping[str, object], with_logits: bool) -> Tensor:
    if with_logits:
        return model(**inputs, use_cache=False).logits
    return model.base_model(**inputs, use_cache=False).last_hidden_state


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits = hidden · weightᵀ, without a bias, a scale or a cap, by the config and by a test on the
    model itself."""
    settings = model.config.to_dict()
    # The test wouldn't notice a cap that is far above the logits, as in a new model.
    if any(settings.get(name) not in (None, 1, 1.0) for name in _CHANGES_LOGITS):
        return False
    weight = model.get_output_embeddings().weight
    token_ids = torch.arange(_PROBE_TOKENS, device=weight.device) % len(weight)
    inputs = {"input_ids": token_ids[None]}
    logits = _run(model, inputs, True)
    hidden = _run(model, inputs, False)
    return torch.allclose(logits, hidden @ weight.T, rtol=1e-3, atol=1e-3)
