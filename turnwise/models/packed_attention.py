"""Causal attention over sequences that are packed one after another, without padding or a block-diagonal
mask.

transformers' attention registry lists it as `PACKED_ATTENTION`, for architectures that use that registry.
Lengths are passed to the model's forward call as `sequences`. A call without `sequences` (a padded batch, a
cache) is plain SDPA. If sequences share prefixes (`models.cpu.prefix_tree`), only the distinct tokens are
packed, and each branch attends to its path."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turnwise.errors import ModelError
from turnwise.models.cpu.attention import BranchAttention, Branches, attention_kernels
from turnwise.models.cpu.prefix_tree import PrefixTree

PACKED_ATTENTION = "turnwise_packed"
_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
_HAS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether torch's varlen attention supports fewer key heads than query heads (from torch 2.12 on)."""


@dataclass(frozen=True)
class PackedSequences:
    """Where the S sequences of a packed batch are: their lengths and, on the model's device, their S + 1
    boundaries (cumulative lengths). With a `tree` the sequences are its branches, and the keys of each branch
    are those along its path."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    tree: PrefixTree | None = None
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "PackedSequences":
        """Sequences of these lengths, packed one after another.

        >>> PackedSequences.of([3, 2], torch.device("cpu")).boundaries
        tensor([0, 3, 5], dtype=torch.int32)
        """
        boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        boundaries[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        return cls(tuple(lengths), boundaries.to(device))

    @classmethod
    def along(cls, tree: PrefixTree) -> "PackedSequences":
        """The branches of a tree as sequences."""
        return replace(cls.of(tree.branch_lengths, tree.tokens.device), tree=tree)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """The number of keys that each sequence attends to."""
        if self.tree is None:
            return self.lengths
        return self.tree.path_lengths

    @cached_property
    def branches(self) -> Branches:
        """The sequences and their paths in the form that turnwise's own kernels read."""
        paths = None if self.tree is None else self.tree.paths.numpy()
        return Branches.of(self.lengths, self.key_lengths, paths)

    def mask(self, query: Tensor, num_keys: int, window: int | None) -> Tensor | None:
        """The mask to add to the scores of `query` [1, heads, N, D] at the last N of `num_keys` positions;
        None if the plain causal mask is right. Masks are views of one tensor per window and dtype, which the
        first call makes."""
        num_queries = query.shape[2]
        if num_queries == num_keys and (window is None or num_keys <= window):
            return None
        key = (window, query.dtype)
        if key not in self._masks:
            self._masks[key] = _band(max(self.key_lengths), window, query)
        return self._masks[key][num_keys - num_queries : num_keys, :num_keys]


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether packed sequences stay apart in this architecture: every layer takes its attention from the
    registry, and no recurrent state continues from one sequence into the next."""
    is_plain = model._supports_attention_backend and model._supports_sdpa and not model._is_stateful
    layer_types = model.config.to_dict().get("layer_types") or ()
    return is_plain and _PACKABLE_LAYERS.issuperset(layer_types)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequences: PackedSequences | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of query [1, Hq, N, D] over key and value [1, Hkv, N, D], within each sequence; returns [1,
    N, Hq, D]. Raises ModelError if the architecture asks for soft-capped logits, attention sinks or a
    position bias."""
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise ModelError(
            f"{type(module).__name__} needs soft-capped logits, sinks or a position bias; set "
            "attn_implementation: eager"
        )
    if sequences is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    kind = query.device.type
    # Under autocast the rotation turns queries and keys from 16 bits back to fp32.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if dtype in (torch.float16, torch.bfloat16) and not dropout and _has_varlen(query.device):
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        return _varlen(query, key, value, sequences, scaling, sliding_window), None
    longest = max(sequences.key_lengths)
    if not dropout and (sliding_window is None or sliding_window >= longest) and query.device.type == "cpu":
        kernels = attention_kernels((query, key, value), sequences.branches)
        if kernels is not None:
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            output: Tensor = BranchAttention.apply(q, k, v, sequences.branches, scale, kernels)
            return output[None], None
    return _each_sequence(query, key, value, sequences, dropout, scaling, sliding_window), None


def _each_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """One SDPA call per sequence. Tensors are cut by `split`, since the gradient of a single slice is as long
    as the tensor."""
    is_grouped = query.shape[1] != key.shape[1]
    if sequences.tree is not None and sequences.key_lengths != sequences.lengths:
        key, value = (tensor.index_select(2, sequences.tree.paths) for tensor in (key, value))
    queries = query.split(sequences.lengths, 2)
    keys, values = (tensor.split(sequences.key_lengths, 2) for tensor in (key, value))
    outputs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        mask = sequences.mask(q, k.shape[2], sliding_window)
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=is_grouped,
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, 1)


def _band(length: int, window: int | None, like: Tensor) -> Tensor:
    """[length, length]: row i is 0 at the last `window` positions up to and including i (None = all), −∞
    elsewhere."""
    mask = torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    if window is not None and window < length:
        mask += torch.full_like(mask, -torch.inf).tril_(-window)
    return mask


@cache
def _has_varlen(device: torch.device) -> bool:
    """Whether torch's varlen kernels run on `device`: on GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1 and not _HAS_GROUPS:
        key, value = (tensor.repeat_interleave(num_groups, 1) for tensor in (key, value))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(sequences.lengths)
    groups: dict[str, Any] = {"enable_gqa": True} if num_groups > 1 and _HAS_GROUPS else {}
    num_before = -1 if sliding_window is None else sliding_window - 1  # −1 stands for all
    output = varlen.varlen_attn(
        q,
        k,
        v,
        sequences.boundaries,
        sequences.boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(num_before, 0),
        **groups,
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
