"""Log-probs of a divided vocabulary are those of a whole one, with their gradients. Threads stand for
ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.models import logprobs
from turnwise.models.logprobs import RaggedIds, token_logprobs
from turnwise.models.sharded_logprobs import VocabularyShard, sharded_logprobs

NUM_TOKENS, WIDTH, VOCABULARY = 7, 5, 11


class Meeting:
    """Reduces tensors of `size` threads, which meet for each."""

    def __init__(self, size: int) -> None:
        self._tensors: list[Tensor | None] = [None] * size
        self._barrier = Barrier(size, timeout=30)
        self.num_meetings = 0

    def reduce(self, rank: int, tensor: Tensor, operation: str) -> None:
        self._tensors[rank] = tensor.clone()
        self._barrier.wait()
        stacked = torch.stack([other for other in self._tensors if other is not None])
        result = stacked.amax(0) if operation == "max" else stacked.sum(0)
        self._barrier.wait()
        tensor.copy_(result)
        self.num_meetings += rank == 0


def made(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)


KEPT = RaggedIds(torch.tensor([0, 4, 9, 10, 3, 5, 1, 2, 10]), torch.tensor([3, 0, 1, 2, 0, 2, 1]))


def of_ranks(
    size: int, temperature: Any, with_entropy: bool, kept: RaggedIds | None = None
) -> tuple[list[Any], Meeting]:
    """For each rank the values, the gradient of the hidden states and that of its rows."""
    hidden, weight, targets = made()
    each = -(-VOCABULARY // size)
    padded = torch.cat([weight, torch.full((each * size - VOCABULARY, WIDTH), 9.0, dtype=weight.dtype)])
    meeting = Meeting(size)

    def run(rank: int) -> list[Tensor]:
        states = hidden.clone().requires_grad_()
        rows = padded[rank * each : (rank + 1) * each].clone().requires_grad_()
        shard = VocabularyShard(
            rank * each, VOCABULARY, lambda tensor, operation: meeting.reduce(rank, tensor, operation)
        )
        result = sharded_logprobs(states, rows, targets, shard, temperature, with_entropy, kept)
        return [*values(result), *torch.autograd.grad(total(result), (states, rows))]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), meeting


def values(result: Any) -> list[Tensor]:
    return [
        tensor.detach() for tensor in (result.full, result.truncated, result.entropy) if tensor is not None
    ]


def total(result: Any) -> Tensor:
    weights = torch.arange(1, NUM_TOKENS + 1)
    sum_of_all = (weights * result.full).sum()
    if result.truncated is not None:
        sum_of_all = sum_of_all + (weights * result.truncated).sum() / 2
    if result.entropy is not None:
        sum_of_all = sum_of_all + (weights * result.entropy).sum()
    return sum_of_all


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 1.5, NUM_TOKENS, dtype=torch.float64)])
def test_they_are_those_of_a_whole_vocabulary(
    size: int, with_entropy: bool, temperature: Any, kept: RaggedIds | None
) -> None:
    hidden, weight, targets = made()
    whole = [hidden.requires_grad_(), weight.requires_grad_()]
    result = token_logprobs(*whole, targets, temperature, with_entropy, kept)
    grad_hidden, grad_weight = torch.autograd.grad(total(result), whole)
    ranks, _ = of_ranks(size, temperature, with_entropy, kept)
    for answer in ranks:
        torch.testing.assert_close(answer[:-2], values(result))
        torch.testing.assert_close(answer[-2], grad_hidden)
    rows = torch.cat([answer[-1] for answer in ranks])
    torch.testing.assert_close(rows[:VOCABULARY], grad_weight)
    assert not rows[VOCABULARY:].any()


def test_ranks_meet_three_times_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    _, meeting = of_ranks(2, 1.0, True)
    assert meeting.num_meetings == 3
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 3 * 6)  # three rows of six columns
    _, meeting = of_ranks(2, 1.0, True)
    assert meeting.num_meetings == 2 * 3 + 1


def test_a_rank_alone_meets_nobody() -> None:
    hidden, weight, targets = made()
    result = sharded_logprobs(hidden, weight, targets, VocabularyShard(0, VOCABULARY))
    torch.testing.assert_close(result.full, token_logprobs(hidden, weight, targets).full)
    assert result.entropy is None


def test_no_trained_token_is_no_error() -> None:
    hidden, weight, targets = made()
    result = sharded_logprobs(hidden[:0], weight, targets[:0], VocabularyShard(0, VOCABULARY), 1.0, True)
    assert result.full.shape == result.entropy.shape == (0,)


def test_under_autocast_the_product_alone_is_narrow() -> None:
    hidden, weight, targets = made(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        divided = sharded_logprobs(hidden, weight, targets, VocabularyShard(0, VOCABULARY), 1.0, True)
        whole = token_logprobs(hidden, weight, targets, 1.0, True)
    assert divided.full.dtype == torch.float32
    torch.testing.assert_close(values(divided), values(whole))
