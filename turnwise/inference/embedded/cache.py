"""The KV cache of the fast path: each layer has one tensor for the keys of all slots and one for the
values."""

from typing import Any

import torch
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.inference.embedded.slot_arrays import power_of_two
from turnwise.models.cpu.build import LANES
from turnwise.models.cpu.shared_prefixes import SharedPrefixes

_FIRST_SLOTS = 8
_FIRST_LENGTH = 256


class KVCache:
    """Tensors `keys[layer]` and `values[layer]` [slots, kv_heads, length, head_dim], in the model's dtype and
    on its device.

    Slots and length start small and double as conversations need them, so the allocated memory follows the
    use. There are at most as many slots of `max_length` tokens as `num_bytes` has room for. Raises
    ConfigError if not even one fits."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_length: int,
        num_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_length = max_length
        self.max_slots = num_slots_within(
            num_bytes, 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize, max_length
        )
        # Kernels read keys in vectors of `LANES` tokens, so a slot has room for whole vectors.
        self._most_tokens = -(-max_length // LANES) * LANES
        self.dtype, self.device = dtype, device
        empty = torch.empty((0, num_kv_heads, 0, head_dim), dtype=dtype, device=device)
        self.keys = [empty] * num_layers
        self.values = [empty] * num_layers
        self.prefixes = SharedPrefixes(self.copy)
        """Says which slots read the beginning of their context from another slot; none without turnwise's own
        kernels."""

    @property
    def num_slots(self) -> int:
        # The last tensor grows last: if memory was too short for all tensors, the next call grows the rest.
        return self.values[-1].shape[0]

    @property
    def length(self) -> int:
        return self.values[-1].shape[2]

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for at least `num_slots` slots of `length` tokens. The cached keys and values stay."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        slots = min(max(power_of_two(num_slots), _FIRST_SLOTS), self.max_slots)
        tokens = min(max(power_of_two(length), _FIRST_LENGTH), self._most_tokens)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            # Assigned together: if memory is too short for both, a layer's keys and values keep the same
            # shape.
            self.keys[layer], self.values[layer] = _grown(keys, slots, tokens), _grown(values, slots, tokens)
        self.prefixes.reserve(slots)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copies the positions from `start` up to `stop` (exclusive) of slot `source` to slot `target`."""
        # NumPy copies a few positions in a quarter of torch's time; it knows no bf16.
        is_numpy = self.device.type == "cpu" and self.dtype == torch.float32
        for tensor in (*self.keys, *self.values):
            cached: Any = tensor.numpy() if is_numpy else tensor
            cached[target, :, start:stop] = cached[source, :, start:stop]

    def free(self) -> None:
        """Empties the cache and frees its memory."""
        self.keys = [keys[:0, :, :0].clone() for keys in self.keys]
        self.values = [values[:0, :, :0].clone() for values in self.values]
        self.prefixes.clear()
        torch.cuda.empty_cache()  # a trainer in another process may have the memory now


def num_slots_within(kv_cache_bytes: int, bytes_per_token: int, max_length: int) -> int:
    """The number of sequences of `max_length` tokens that fit into `kv_cache_bytes`. Raises ConfigError if
    none does.

    >>> num_slots_within(1_000_000, bytes_per_token=100, max_length=1000)
    10
    """
    slot_bytes = bytes_per_token * max_length
    if kv_cache_bytes < slot_bytes:
        raise ConfigError(
            f"kv_cache_bytes is {kv_cache_bytes:,}, but one sequence takes {bytes_per_token:,} bytes per "
            f"token × "
            f"{max_length:,} tokens = {slot_bytes:,}; raise kv_cache_bytes or lower max_length "
            f"(sequence_length in a config)"
        )
    return kv_cache_bytes // slot_bytes


def _grown(tensor: Tensor, num_slots: int, length: int) -> Tensor:
    slots, heads, tokens, dim = tensor.shape
    larger = tensor.new_zeros((max(slots, num_slots), heads, max(tokens, length), dim))
    larger[:slots, :, :tokens] = tensor
    return larger
