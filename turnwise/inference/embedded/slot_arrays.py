"""The state of all slots as arrays, so that a step handles all rows at once."""

import numpy as np
from numpy.typing import NDArray

from turnwise.inference.request import Request
from turnwise.types import FloatArray, IntArray

ROW = np.dtype(
    [
        ("cached", np.int64),  # tokens whose keys and values are in the cache
        ("length", np.int64),  # tokens of the context, sampled ones included
        ("num_new", np.int64),  # tokens that the next forward pass computes
        ("prompt_length", np.int64),
        ("limit", np.int64),  # length of the context at which the request ends
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("is_greedy", np.bool_),
        ("keeps_ids", np.bool_),  # whether the ids that a token is drawn from are returned
        (
            "is_plain",
            np.bool_,
        ),  # whether logits stay as they are: temperature 1 or greedy, without truncation or penalty
        ("has_stop_strings", np.bool_),
        ("is_running", np.bool_),
    ]
)
_NO_TOKEN = -1


class Rows:
    """The arrays of S slots: `state` [S] of dtype `ROW`, `ids` and `logprobs` [S, capacity], `stop_ids` [S,
    K] padded with −1. Between steps every running row has `cached < length`: the tokens in between are still
    to be computed."""

    def __init__(self) -> None:
        self.state = np.zeros(0, ROW)
        self.ids: IntArray = np.zeros((0, 0), np.int64)
        self.logprobs: FloatArray = np.zeros((0, 0), np.float32)
        self.stop_ids: IntArray = np.zeros((0, 1), np.int64)

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Makes room for at least `num_slots` slots of `capacity` tokens. Sizes are powers of two, so arrays
        seldom grow."""
        if num_slots <= len(self.state) and capacity <= self.ids.shape[1]:
            return
        num_slots = power_of_two(max(num_slots, len(self.state)))
        capacity = power_of_two(max(capacity, self.ids.shape[1]))
        self.state = _grown(self.state, (num_slots,), 0)
        self.ids = _grown(self.ids, (num_slots, capacity), 0)
        self.logprobs = _grown(self.logprobs, (num_slots, capacity), 0)
        self.stop_ids = _grown(self.stop_ids, (num_slots, self.stop_ids.shape[1]), _NO_TOKEN)

    def common_prefix(self, slot: int, context_ids: IntArray) -> int:
        """The length of the common prefix of `context_ids` and the slot's context, whether it is cached or
        not."""
        length = min(int(self.state["length"][slot]), len(context_ids))
        own, other = self.ids[slot, :length], context_ids[:length]
        if own.tobytes() == other.tobytes():
            return length
        return int((own == other).argmin())

    def context(self, slot: int) -> IntArray:
        """The tokens of a slot's context."""
        return self.ids[slot, : self.state["length"][slot]]

    def load(self, slot: int, request: Request, num_cached: int, max_length: int) -> None:
        """Starts a request in a slot whose cache holds the first `num_cached` tokens of the request's
        context."""
        sampling, context_ids = request.sampling, request.context_ids
        prompt_length = len(request.prompt_ids)
        self.state[slot] = (
            num_cached,
            len(context_ids),
            0,
            prompt_length,
            min(prompt_length + sampling.max_new_tokens, max_length),
            sampling.seed,
            1.0 if sampling.is_greedy else sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.is_greedy,
            sampling.keeps_ids,
            not sampling.is_truncated and (sampling.is_greedy or sampling.temperature == 1.0),
            bool(sampling.stop_strings),
            True,
        )
        self.ids[slot, : len(context_ids)] = context_ids
        num_stops = len(sampling.stop_token_ids)
        if num_stops > self.stop_ids.shape[1]:
            self.stop_ids = _grown(self.stop_ids, (len(self.state), num_stops), _NO_TOKEN)
        self.stop_ids[slot] = _NO_TOKEN
        self.stop_ids[slot, :num_stops] = sampling.stop_token_ids

    def response(self, slot: int) -> tuple[IntArray, FloatArray]:
        """Copies of the tokens and log-probs of a slot's response. The request's partial tokens have no valid
        log-probs."""
        start, stop = self.state["prompt_length"][slot], self.state["length"][slot]
        return self.ids[slot, start:stop].copy(), self.logprobs[slot, start:stop].copy()


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def _grown(array: NDArray, shape: tuple[int, ...], fill: int) -> NDArray:
    if array.shape == shape:
        return array
    larger = np.full(shape, fill, array.dtype) if fill else np.zeros(shape, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
