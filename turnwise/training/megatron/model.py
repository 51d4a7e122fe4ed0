"""A decoder made of Megatron's layers, or the part of it that one rank holds, over packed samples."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn

from turnwise.errors import NotAvailableError
from turnwise.models.forward import kept_ids_of
from turnwise.models.sharded_logprobs import VocabularyShard, sharded_logprobs
from turnwise.protocols import Output
from turnwise.training.megatron.context import TokenShare, whole
from turnwise.training.megatron.groups import (
    context_rank,
    reduce_over_tensor_ranks,
    sum_over_context_ranks,
    tensor_rank,
)
from turnwise.types import Batch

POLICY_OUTPUTS: frozenset[Output] = frozenset({"logprobs", "full_logprobs", "entropy"})
VALUE_OUTPUTS: frozenset[Output] = frozenset({"values", "next_values"})


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a model is, beside the configuration of its layers."""

    vocab_size: int
    frequencies: Tensor
    """[D / 2], those of the rotary embedding."""
    is_tied: bool
    is_value_model: bool
    has_value_bias: bool = False
    padding_id: int | None = None
    """The token whose embedding gets no gradient from being read (torch's `padding_idx`)."""
    temperature: float = 1.0
    packs_kernels: bool = False
    """Whether attention is TransformerEngine's over packed samples; else one dense mask keeps them apart."""


class Norm(nn.Module):
    """Root-mean-square normalisation, computed in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        # Megatron sums gradients of parameters with this flag over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        precise = states.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (precise * scale).to(states.dtype)


class DecoderPart(LanguageModule):
    """The layers of one pipeline stage, or of one part of it, with the embedding on the first stage
    (`pre_process`) and the head on the last (`post_process`). Of each layer this rank has its tensor-parallel
    part."""

    def __init__(
        self,
        config: TransformerConfig,
        decoder: Decoder,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.described = decoder
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = decoder.is_tied and not decoder.is_value_model
        size, _ = tensor_rank()
        self._rows_per_rank = -(-decoder.vocab_size // size)
        self.register_buffer("frequencies", decoder.frequencies, persistent=False)
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, self._rows_per_rank * size, 1, position_embedding_type="none"
            )
        layers = [_layer(config, decoder)] * get_num_layers_to_build(config, vp_stage)
        self.decoder = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        if post_process:
            self._make_head(size)
        if self.share_embeddings_and_output_weights and (pre_process or post_process):
            self.setup_embeddings_and_output_layer()

    def _make_head(self, num_tensor_ranks: int) -> None:
        if self.described.is_value_model:
            self.value_head = nn.Linear(self.config.hidden_size, 1, bias=self.described.has_value_bias)
            return
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            self.config.hidden_size,
            self._rows_per_rank * num_tensor_ranks,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
        )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Megatron's schedule hands over the hidden states of the stage before this one."""
        if isinstance(input_tensor, list):
            [input_tensor] = input_tensor
        self.decoder.set_input_tensor(input_tensor)

    def forward(self, batch: Batch, outputs: frozenset[Output]) -> Tensor | dict[str, Tensor]:
        """Hidden states [N, 1, H] for the next stage; on the last one the `outputs`, tensors [N] that are 0
        outside the response mask. Raises NotAvailableError if the head doesn't give an output."""
        gives = VALUE_OUTPUTS if self.described.is_value_model else POLICY_OUTPUTS
        if outputs - gives:
            unknown = " or ".join(sorted(outputs - gives))
            raise NotAvailableError(f"this model gives {' and '.join(sorted(gives))}, but no {unknown}")
        share = TokenShare.of(batch, *context_rank(), self._divisor)
        states = self._states(share, self.described.packs_kernels)
        if not self.post_process:
            return states
        computed = self._outputs(batch, share, states, outputs)
        add = sum_over_context_ranks if context_rank()[0] > 1 else None
        return {name: whole(values, add) for name, values in computed.items()}

    def compared(self, token_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """As `forward`, of the tokens [N] of one sequence, all of them on each context-parallel rank, with
        Megatron's own attention, which computes in fp32 on any device. On the last stage `compared`: this
        rank's columns of the logits [N, V / ranks] at temperature 1; the hidden states [N, H] of a value
        model."""
        share = TokenShare.of_sequence(token_ids, self._divisor)
        with self._own_attention():
            states = self._states(share, is_packed=False)
        if not self.post_process:
            return states
        states = states[: len(token_ids), 0]
        if not self.described.is_value_model:
            states = torch.nn.functional.linear(states, self._head_weight())
        return {"compared": states}

    @property
    def _divisor(self) -> int:
        """Which numbers of tokens can be divided among ranks."""
        return tensor_rank()[0] if self.config.sequence_parallel else 1

    def _states(self, share: TokenShare, is_packed: bool) -> Tensor:
        """Hidden states [M, 1, H] after this part's layers, with sequence parallelism this rank's rows of
        them unless the head is here."""
        states = None
        if self.pre_process:
            states = self._embedded(share.token_ids)
        states = self.decoder(
            hidden_states=states,
            attention_mask=None if is_packed else _mask(share),
            rotary_pos_emb=self._angles(share, is_packed),
            packed_seq_params=_packed(share) if is_packed else None,
        )
        if self.post_process and self.config.sequence_parallel:
            # The gradient that comes back is the same on all ranks, so each takes its rows of it.
            states = tensor_parallel.gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=False
            )
        return states

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """In this context attention is Megatron's, not TransformerEngine's, which computes packed samples in
        half precision alone. Neither has parameters."""
        kernels: dict[Any, nn.Module] = {}
        config = copy.copy(self.config)
        config.context_parallel_size = 1
        for layer in self.decoder.layers:
            attention = layer.self_attention
            kernels[attention] = attention.core_attention
            attention.core_attention = DotProductAttention(
                config, layer.layer_number, AttnMaskType.causal, "self"
            )
        try:
            yield
        finally:
            for attention, kernel in kernels.items():
                attention.core_attention = kernel

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """[N, 1, H], or this rank's rows of it with sequence parallelism."""
        states: Tensor = self.embedding(input_ids=token_ids[None], position_ids=None)
        if self.described.padding_id is None:
            return states
        if self.config.sequence_parallel:
            size, rank = tensor_rank()
            token_ids = token_ids.chunk(size)[rank]
        is_padding = token_ids == self.described.padding_id
        return torch.where(is_padding[:, None, None], states.detach(), states)

    def _angles(self, share: TokenShare, is_packed: bool) -> Tensor:
        """[M, 1, 1, D], the angles of each token's position; for packed kernels those of positions 0, 1, …
        up to the longest sample, of which each rank takes its own."""
        positions = share.position_ids
        if is_packed:
            positions = torch.arange(max(share.lengths), device=positions.device)
        angles = positions.float()[:, None] * self.frequencies
        return torch.cat([angles, angles], -1)[:, None, None]

    def _outputs(
        self, batch: Batch, share: TokenShare, states: Tensor, outputs: frozenset[Output]
    ) -> dict[str, Tensor]:
        """The outputs of this rank's tokens, and 0 at other tokens."""
        trained = batch.response_mask.nonzero().squeeze(-1)
        if self.described.is_value_model:
            tokens = {"values": trained - 1, "next_values": trained}
            computed: dict[str, Tensor] = {}
            # In an order that is the same in all processes, since the ranks add one output up at a time.
            for name in sorted(outputs):
                chosen, places = share.held(tokens[name], batch.num_tokens)
                values = self._values(states[places, 0])
                computed[name] = _aligned(values, batch, trained[chosen])
            return computed
        chosen, places = share.held(trained - 1, batch.num_tokens)
        trained = trained[chosen]
        kept = kept_ids_of(batch, trained)
        result = sharded_logprobs(
            states[places, 0],
            self._head_weight(),
            batch.token_ids[trained],
            self._shard(),
            self._temperature(batch, trained),
            "entropy" in outputs,
            kept,
        )
        full = _aligned(result.full, batch, trained)
        named = {"logprobs": full}
        if result.truncated is not None:
            named["logprobs"] = _aligned(result.truncated, batch, trained)
        if kept is not None or "full_logprobs" in outputs:
            named["full_logprobs"] = full
        if result.entropy is not None:
            named["entropy"] = _aligned(result.entropy, batch, trained)
        return named

    def _values(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.value_head(states.float()).squeeze(-1)
        return values

    def _head_weight(self) -> Tensor:
        weight: Tensor = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return weight

    def _shard(self) -> VocabularyShard:
        size, rank = tensor_rank()
        reduce = reduce_over_tensor_ranks if size > 1 else None
        return VocabularyShard(rank * self._rows_per_rank, self.described.vocab_size, reduce)

    def _temperature(self, batch: Batch, trained: Tensor) -> float | Tensor:
        if batch.temperatures is None:
            return self.described.temperature
        of_tokens: Tensor = batch.temperatures[trained]
        return of_tokens.where(of_tokens > 0, self.described.temperature)


def _mask(share: TokenShare) -> Tensor:
    """bool [1, 1, M, M]: whether a token may not see another one."""
    device = share.token_ids.device
    lengths = torch.tensor([*share.lengths], device=device)
    samples = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    is_other = samples[:, None] != samples
    is_later = torch.ones_like(is_other).triu(1)
    return (is_other | is_later)[None, None]


def _packed(share: TokenShare) -> PackedSeqParams:
    """What fills a sample counts as a part of it, which causal attention allows."""
    lengths = torch.tensor([0, *share.lengths], device=share.token_ids.device)
    boundaries = lengths.cumsum(0, dtype=torch.int32)
    longest = max(share.lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _layer(config: TransformerConfig, decoder: Decoder) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = Norm
    parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = Norm
        attention.k_layernorm = Norm
    if decoder.packs_kernels:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        attention.core_attention = TEDotProductAttention
    return spec


def _aligned(values: Tensor, batch: Batch, trained: Tensor) -> Tensor:
    return values.new_zeros(batch.num_tokens).index_copy(0, trained, values)
