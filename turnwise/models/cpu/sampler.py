"""Draws tokens by turnwise's own C kernel."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.types import FloatArray, IntArray


def draw_natively(
    kernels: ctypes.CDLL,
    scores: Tensor,
    is_greedy: NDArray[np.bool_],
    numbers: FloatArray,
) -> tuple[IntArray, FloatArray] | None:
    """A token [B] for each row of `scores` [B, V], which are overwritten, and its log-prob [B]. A greedy row
    gets its likeliest token, with log-prob 0; in other rows the uniform `numbers` [B] pick it. None if a row
    has NaN, +inf or only −inf."""
    greedy = np.ascontiguousarray(is_greedy)
    tokens = np.empty(len(greedy), np.int64)
    log_probs = np.empty(len(greedy), np.float32)
    arrays = [array.ctypes.data for array in (greedy, numbers, tokens, log_probs)]
    has_failed = kernels.draw(scores.data_ptr(), *arrays, *scores.shape, torch.get_num_threads())
    if has_failed:
        return None
    return tokens, log_probs
