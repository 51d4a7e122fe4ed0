"""The fast path computes the same by the library's own kernels and by torch's, and whatever a forward pass is
cut into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_model import toy_model
from transformers import PreTrainedModel

from turnwise.inference.embedded import cache, fused_runner
from turnwise.inference.embedded.fused_runner import FusedRunner
from turnwise.inference.embedded.runner import PackedStep
from turnwise.models.cpu.build import load_kernels
from turnwise.types import IntArray

CONTEXTS = np.random.default_rng(0).integers(0, 40, (6, 60))


def make_model(model_type: str) -> PreTrainedModel:
    changes = {"attention_bias": model_type == "llama", "tie_word_embeddings": False}
    model = toy_model(model_type=model_type, attn_implementation="sdpa", vocab_size=40, **changes)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def steps() -> list[PackedStep]:
    """Prompts of several lengths, then decoding, then both at once."""
    slots, nothing = np.arange(6), np.zeros(6, np.int64)
    first = np.array([5, 17, 1, 30, 8, 21])
    mixed = np.array([1, 9, 1, 1, 20, 1])
    return [step(slots, nothing, first), step(slots, first, nothing + 1), step(slots, first + 1, mixed)]


def step(slots: IntArray, starts: IntArray, counts: IntArray) -> PackedStep:
    return PackedStep.pack(CONTEXTS, slots, starts, counts, starts + counts)


def logits_of(model: PreTrainedModel, may_be_native: bool) -> list[Tensor]:
    runner = FusedRunner(model, max_length=64, kv_cache_bytes=2**22, may_be_native=may_be_native)
    runner.reserve(6, 64)
    with torch.inference_mode():
        return [runner.forward(step) for step in steps()]


@pytest.mark.skipif(load_kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_own_kernels_and_torch_agree(kind: str) -> None:
    model = make_model(kind)
    for own, right in zip(logits_of(model, True), logits_of(model, False), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("may_be_native", [True, False])
def test_logits_and_keys_are_those_of_token_by_token(may_be_native: bool) -> None:
    """The last layer is computed whole for last tokens only: what others leave in the cache is all that later
    ones see."""
    model = make_model("qwen3")
    runner = FusedRunner(model, max_length=64, kv_cache_bytes=2**22, may_be_native=may_be_native)
    runner.reserve(6, 64)
    contexts = torch.from_numpy(CONTEXTS[:, :12])
    with torch.inference_mode():
        right = model(contexts).logits
        chunk = np.array([7, 5, 7, 5, 7, 5])
        first = PackedStep.pack(CONTEXTS, np.arange(6), np.zeros(6, np.int64), chunk, np.full(6, 7))
        torch.testing.assert_close(runner.forward(first), right[::2, 6], rtol=1e-4, atol=1e-4)
        unended = PackedStep.pack(CONTEXTS, np.arange(6), chunk, 11 - chunk, np.full(6, 12))
        assert runner.forward(unended).shape == (0, 40)
        last = PackedStep.pack(CONTEXTS, np.arange(6), np.full(6, 11), np.ones(6, np.int64), np.full(6, 12))
        torch.testing.assert_close(runner.forward(last), right[:, 11], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("may_be_native", [True, False])
def test_a_pass_in_blocks_is_the_whole_pass(monkeypatch: pytest.MonkeyPatch, may_be_native: bool) -> None:
    model = make_model("qwen3")
    whole = logits_of(model, may_be_native)
    monkeypatch.setattr(fused_runner, "_BLOCK_TOKENS", 12)
    for cut, right in zip(logits_of(model, may_be_native), whole, strict=True):
        torch.testing.assert_close(cut, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("may_be_native", [True, False])
def test_a_cache_that_could_grow_only_in_part_answers_as_before(
    monkeypatch: pytest.MonkeyPatch, may_be_native: bool
) -> None:
    model = make_model("qwen3")
    whole, torn = (
        FusedRunner(model, max_length=600, kv_cache_bytes=2**24, may_be_native=may_be_native)
        for _ in range(2)
    )
    grown, calls = cache._grown, []

    def short_of_memory(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return grown(*arguments)

    first, then, _ = steps()
    with torch.inference_mode():
        for runner in (whole, torn):
            runner.reserve(6, 64)
            runner.forward(first)
        monkeypatch.setattr(cache, "_grown", short_of_memory)
        with pytest.raises(RuntimeError):
            torn.reserve(6, 500)
        torn.reserve(6, 100)
        torch.testing.assert_close(torn.forward(then), whole.forward(then), rtol=0, atol=0)


def test_blocks_hold_whole_rows_and_no_more_than_asked() -> None:
    blocks = list(steps()[0].cut(22))
    assert [block.counts.tolist() for block in blocks] == [[5, 17], [1], [30], [8], [21]]
    assert [block.last_tokens.tolist() for block in blocks] == [[4, 21], [0], [29], [7], [20]]
    assert all(block.rows.min() == 0 for block in blocks)


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 8), ("float32", 12)])
def test_what_the_kernels_are_not_made_for_runs_on_torch(dtype: str, head_dim: int) -> None:
    model = toy_model(head_dim=head_dim).to(vars(torch)[dtype])
    assert FusedRunner(model, max_length=64, kv_cache_bytes=2**22).name == "fused"
