"""Runners compute the engine's forward passes and keep its KV cache: their protocol, and a runner for any
causal LM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.inference.embedded.cache import num_slots_within
from turnwise.types import IntArray


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One forward pass: `N` new tokens of `B` rows, packed row after row."""

    slots: IntArray  # [B] slot of each row, ascending
    # [B] tokens that each row's slot has cached, which is the position of its first new token
    starts: IntArray
    counts: IntArray  # [B] new tokens, at least 1
    rows: IntArray  # [N] row of each token
    positions: IntArray  # [N] position of each token in its context
    token_ids: IntArray  # [N]
    # [B] whether the row's context is fully computed, so that its next token can be sampled
    ends_context: NDArray[np.bool_]
    last_tokens: IntArray  # [C] index in the pack of the last token of each such row

    @classmethod
    def pack(
        cls,
        ids: IntArray,
        slots: IntArray,
        starts: IntArray,
        counts: IntArray,
        lengths: IntArray,
    ) -> "PackedStep":
        """The step over `counts` [B] tokens of each slot in `slots` [B], from the positions `starts` [B] on.
        `ids` [S, L] holds the contexts of all slots; those of `slots` have `lengths` [B] tokens.

        >>> ids = np.array([[5, 6, 7], [8, 9, 4]])
        >>> counts, lengths = np.array([1, 2]), np.array([3, 3])
        >>> step = PackedStep.pack(ids, np.array([0, 1]), np.array([2, 0]), counts, lengths)
        >>> step.token_ids, step.positions, step.last_tokens
        (array([7, 8, 9]), array([2, 0, 1]), array([0]))
        """
        if len(slots) == counts.sum():
            rows = last_tokens = np.arange(len(slots))
            positions = starts.copy()  # contiguous, though `starts` may be a field of a structured array
        else:
            rows = np.repeat(np.arange(len(slots)), counts)
            last_tokens = np.cumsum(counts) - 1
            first_tokens = last_tokens + 1 - counts
            positions = starts[rows] + np.arange(len(rows)) - first_tokens[rows]
        ends_context = starts + counts == lengths
        return cls(
            slots,
            starts,
            counts,
            rows,
            positions,
            token_ids=ids[slots[rows], positions],
            ends_context=ends_context,
            last_tokens=last_tokens[ends_context],
        )

    def tail(self) -> "PackedStep":
        """Returns a step of one token per row: the last token of each row whose context ends with this step.

        >>> ids = np.array([[5, 6, 7], [8, 9, 4]])
        >>> counts, lengths = np.array([1, 3]), np.array([3, 3])
        >>> step = PackedStep.pack(ids, np.array([0, 1]), np.array([2, 0]), counts, lengths)
        >>> step.tail().token_ids, step.tail().starts
        (array([7, 4]), array([2, 2]))
        """
        slots = self.slots[self.ends_context]
        positions = self.positions[self.last_tokens]
        order = np.arange(len(slots))
        ones = np.ones_like(slots)
        return PackedStep(
            slots,
            starts=positions,
            counts=ones,
            rows=order,
            positions=positions,
            token_ids=self.token_ids[self.last_tokens],
            ends_context=ones.astype(np.bool_),
            last_tokens=order,
        )

    def cut(self, max_tokens: int) -> "Iterator[PackedStep]":
        """Groups the rows, in order, into steps of at most `max_tokens` tokens. A row with more tokens is a
        step of its own."""
        ends = np.cumsum(self.counts)
        first = 0
        begin = 0
        while first < len(ends):
            num_fitting = int(np.searchsorted(ends, begin + max_tokens, side="right"))
            stop = max(num_fitting, first + 1)
            end = int(ends[stop - 1])
            is_within = (self.last_tokens >= begin) & (self.last_tokens < end)
            yield PackedStep(
                self.slots[first:stop],
                self.starts[first:stop],
                self.counts[first:stop],
                self.rows[begin:end] - first,
                self.positions[begin:end],
                self.token_ids[begin:end],
                self.ends_context[first:stop],
                self.last_tokens[is_within] - begin,
            )
            first = stop
            begin = end


class Runner(Protocol):
    """Computes logits and keeps keys and values by slot. The engine calls it under `torch.inference_mode`."""

    max_slots: int
    """The number of sequences of full length that the bound on the cache's memory has room for."""
    name: str
    """Name of the forward pass, for the table at the start of a run."""
    can_copy: bool
    """Whether one slot's cache can be copied to another."""

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for at least `num_slots` slots of `length` tokens. What is cached stays."""

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        """Prepares a slot for a context that begins with the first `num_common` of the slot's `num_cached`
        cached tokens. Returns how many of these tokens stay cached. The others may be overwritten from now
        on."""

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        """Copies the cache of positions `start` to `stop` (exclusive) from slot `source` to `target`. Needs
        `can_copy`."""

    def forward(self, step: PackedStep) -> Tensor:
        """Returns logits [C, V] float32: those of the next token of each row whose context ends with this
        step."""

    def refresh(self, cached_slots: Sequence[int] = ()) -> None:
        """Must be called after the weights have changed or moved. Caches are dropped, except those of
        `cached_slots`."""

    def free(self) -> None:
        """Frees the cache's memory."""


class GenericRunner:
    """Forward passes through `model(input_ids, past_key_values)`. Caches of some architectures (windows,
    recurrent states) can't be cut back, so a slot's cache is used whole or not at all. The memory bound
    assumes as many key heads as query heads. Raises ConfigError if `kv_cache_bytes` has no room for one
    sequence of `max_length` tokens."""

    def __init__(self, model: PreTrainedModel, *, max_length: int, kv_cache_bytes: int) -> None:
        config = model.config
        values = config.to_dict()
        # Heads may be wider than their share of the hidden size (Gemma).
        heads_width = (values.get("num_attention_heads") or 0) * (values.get("head_dim") or 0)
        width = max(config.hidden_size, heads_width)
        bytes_per_token = 2 * config.num_hidden_layers * width * model.dtype.itemsize
        self.max_slots = num_slots_within(kv_cache_bytes, bytes_per_token, max_length)
        self._model = model
        self._caches: dict[int, Any] = {}
        self.name = "the model's own"
        self.can_copy = False

    def reserve(self, num_slots: int, length: int) -> None:
        """Does nothing: the model's caches grow by themselves."""

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        return num_common if num_common == num_cached else 0

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        raise NotImplementedError("can_copy is False")

    def refresh(self, cached_slots: Sequence[int] = ()) -> None:
        self._caches = {slot: self._caches[slot] for slot in cached_slots}

    def free(self) -> None:
        self._caches.clear()

    def forward(self, step: PackedStep) -> Tensor:
        was_training = self._model.training
        if was_training:
            self._model.eval()
        try:
            ends = np.cumsum(step.counts)
            rows = zip(step.slots, step.starts, ends - step.counts, ends, strict=True)
            logits = torch.stack(
                [
                    self._row(int(slot), int(start), step.token_ids[begin:end])
                    for slot, start, begin, end in rows
                ]
            )
            return logits[torch.from_numpy(step.ends_context)].float()
        finally:
            if was_training:
                self._model.train()

    def _row(self, slot: int, start: int, token_ids: Any) -> Tensor:
        cache = self._caches.pop(slot) if start else None
        input_ids = torch.from_numpy(token_ids)[None].to(self._model.device)
        output = self._model(
            input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if output.get("past_key_values") is None:
            raise ModelError(
                f"{type(self._model).__name__} returns no past_key_values; sample from it with "
                "strategy_name: hf"
            )
        self._caches[slot] = output.past_key_values
        return output.logits[0, -1]
