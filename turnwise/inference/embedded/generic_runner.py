"""Runs any other causal LM by its own forward pass, row after row, with a cache of its own per slot. Correct, not fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.inference.embedded.cache import num_slots_within
from turnwise.inference.embedded.runner import PackedStep


class GenericRunner:
    """Forward passes through `model(input_ids, past_key_values)`.

    Caches of some architectures (windows, recurrent states) can't be cut back, so a prefix is used whole or not at all. The
    memory bound counts as many key heads as there are query heads.

    Raises:
        ConfigError: `kv_cache_bytes` has no room for one sequence of `max_length` tokens.
    """

    def __init__(self, model: PreTrainedModel, *, max_length: int, kv_cache_bytes: int) -> None:
        config = model.config
        values = config.to_dict()
        # Heads may be wider than their share of the hidden size (Gemma).
        width = max(config.hidden_size, (values.get("num_attention_heads") or 0) * (values.get("head_dim") or 0))
        bytes_per_token = 2 * config.num_hidden_layers * width * model.dtype.itemsize
        self.max_slots = num_slots_within(kv_cache_bytes, bytes_per_token, max_length)
        self._model = model
        self._caches: dict[int, Any] = {}
        self.name = "the model's own"
        self.can_copy = False

    def reserve(self, num_slots: int, length: int) -> None:
        """Nothing to do: the model's caches grow by themselves."""

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        return num_common if num_common == num_cached else 0

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        raise NotImplementedError("can_copy is False")

    def refresh(self) -> None:
        self._caches.clear()

    def free(self) -> None:
        self._caches.clear()

    def forward(self, step: PackedStep) -> Tensor:
        was_training = self._model.training
        if was_training:
            self._model.eval()
        try:
            ends = np.cumsum(step.counts)
            rows = zip(step.slots, step.starts, ends - step.counts, ends, strict=True)
            logits = torch.stack([self._row(int(s), int(start), step.token_ids[a:b]) for s, start, a, b in rows])
            return logits[torch.from_numpy(step.ends_context)].float()
        finally:
            if was_training:
                self._model.train()

    def _row(self, slot: int, start: int, token_ids: Any) -> Tensor:
        cache = self._caches.pop(slot) if start else None
        input_ids = torch.from_numpy(token_ids)[None].to(self._model.device)
        output = self._model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if output.get("past_key_values") is None:
            raise ModelError(f"{type(self._model).__name__} returns no past_key_values; sample from it with strategy_name: hf")
        self._caches[slot] = output.past_key_values
        return output.logits[0, -1]
