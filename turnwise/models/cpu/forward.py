"""A small model's whole forward pass, matrix products included, in one call of turnwise's own C kernels."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.models.fused import FusedLinear, HeadShape, LayerWeights
from turnwise.types import IntArray

PANEL = 16
"""The number of rows of a weight matrix that are stored interleaved; must equal `WIDE` in `products.h`."""


class _Linear(ctypes.Structure):
    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("input_norm", "head_norms", "post_norm")],
        *[(name, _Linear) for name in ("qkv", "output", "gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in ("keys", "values")],
        ("capacity", ctypes.c_int64),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *[(name, ctypes.c_void_p) for name in ("embedding", "rotary", "final_norm")],
        ("lm_head", _Linear),
        *[(name, ctypes.c_void_p) for name in ("bases", "splits")],
        *[(name, ctypes.c_int64) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")],
        *[(name, ctypes.c_float) for name in ("scale", "eps")],
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("token_ids", "slots", "positions", "last_tokens")],
        *[(name, ctypes.c_int64) for name in ("num_tokens", "num_last")],
    ]


class NativeForward:
    """Forward passes by C kernels over their own copy of the weights: each `PANEL` rows of a matrix are
    interleaved, in the order that the kernels read. A token's result depends neither on the number of threads
    nor on the rest of the batch."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        layers: Sequence[LayerWeights],
        shape: HeadShape,
        *,
        embedding: Tensor,
        rotary: Tensor,
        final_norm: Tensor,
        lm_head: Tensor,
    ) -> None:
        self._kernels = kernels
        self._length = len(rotary)
        self._vocab_size = len(lm_head)
        self._num_embeddings = len(embedding)
        self._buffers: list[Tensor] = []  # the memory that the structures point to
        self._layers = (_Layer * len(layers))(*(self._layer(layer) for layer in layers))
        self._decoder = _Decoder(
            layers=self._layers,
            embedding=self._pointer(embedding),
            rotary=self._pointer(rotary),
            final_norm=self._pointer(final_norm),
            lm_head=self._linear(FusedLinear(lm_head, None)),
            num_layers=len(layers),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            eps=shape.eps,
        )
        self._workspace = embedding.new_empty(0)

    def _layer(self, layer: LayerWeights) -> _Layer:
        return _Layer(
            input_norm=self._pointer(layer.input_norm),
            head_norms=self._pointer(layer.head_norms),
            post_norm=self._pointer(layer.post_norm),
            qkv=self._linear(layer.qkv),
            output=self._linear(layer.output),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
        )

    def _linear(self, linear: FusedLinear) -> _Linear:
        num_outputs, num_inputs = linear.weight.shape
        num_panels = -(-num_outputs // PANEL)
        padded = F.pad(linear.weight, (0, 0, 0, num_panels * PANEL - num_outputs))
        panels = padded.view(num_panels, PANEL, num_inputs).transpose(1, 2)
        return _Linear(self._pointer(panels), self._pointer(linear.bias), num_inputs, num_outputs)

    def _pointer(self, tensor: Tensor | None) -> int | None:
        """The address of a contiguous copy of the tensor; None for None."""
        if tensor is None:
            return None
        self._buffers.append(tensor.clone(memory_format=torch.contiguous_format))
        return self._buffers[-1].data_ptr()

    def __call__(
        self,
        token_ids: IntArray,
        slots: IntArray,
        positions: IntArray,
        last_tokens: IntArray,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        bases: IntArray,
        splits: IntArray,
    ) -> Tensor:
        """Logits [C, V] at `last_tokens` [C], indices among N packed tokens. Each token has an id, a cache
        slot and a position, [N]. Writes each layer's `keys` and `values` [S, kv_heads, length, head_dim].
        Positions of slot s below `splits[s]` [S] are read from slot `bases[s]`. Raises IndexError if an id
        has no embedding, or a slot or position is too large."""
        num_tokens = len(token_ids)
        num_slots, _, length, _ = values[-1].shape
        if token_ids.min() < 0 or token_ids.max() >= self._num_embeddings:
            raise IndexError(f"a step has token ids beyond the {self._num_embeddings} that the model embeds")
        if slots.max() >= num_slots or positions.max() >= min(length, self._length):
            raise IndexError(f"a step goes beyond a cache of {num_slots} slots of {length} tokens")
        for layer, layer_keys, layer_values in zip(self._layers, keys, values, strict=True):
            layer.keys = layer_keys.data_ptr()
            layer.values = layer_values.data_ptr()
            layer.capacity = layer_keys.shape[2]
        num_threads = torch.get_num_threads()
        decoder = self._decoder
        decoder.bases = bases.ctypes.data
        decoder.splits = splits.ctypes.data
        size = self._kernels.workspace_size(ctypes.byref(decoder), num_tokens, num_threads)
        if size > len(self._workspace):
            self._workspace = self._workspace.new_empty(size)
        logits = self._workspace.new_empty(len(last_tokens), self._vocab_size)
        step = _Step(
            token_ids=token_ids.ctypes.data,
            slots=slots.ctypes.data,
            positions=positions.ctypes.data,
            last_tokens=last_tokens.ctypes.data,
            num_tokens=num_tokens,
            num_last=len(last_tokens),
        )
        self._kernels.forward(
            ctypes.byref(decoder),
            ctypes.byref(step),
            self._workspace.data_ptr(),
            logits.data_ptr(),
            num_threads,
        )
        return logits
