"""The fast path computes the same by the library's own kernels and by torch's, and whatever a forward pass is cut into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from turnwise.inference.embedded import cache, fused_runner
from turnwise.inference.embedded.fused_runner import FusedRunner
from turnwise.inference.embedded.layer_ops import HeadShape, LayerOps, MakeOps
from turnwise.inference.embedded.native_ops import choose_ops
from turnwise.inference.embedded.runner import Step
from turnwise.inference.embedded.torch_ops import TorchOps
from turnwise.kernels.build import load_kernels
from turnwise.types import IntArray

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONTEXTS = np.random.default_rng(0).integers(0, 40, (6, 60))


def make_model(kind: str) -> Qwen3ForCausalLM | LlamaForCausalLM:
    torch.manual_seed(0)
    if kind == "qwen3":
        model: Qwen3ForCausalLM | LlamaForCausalLM = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attention_bias=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def steps() -> list[Step]:
    """Prompts of several lengths, then decoding, then both at once."""
    slots, nothing = np.arange(6), np.zeros(6, np.int64)
    first = np.array([5, 17, 1, 30, 8, 21])
    mixed = np.array([1, 9, 1, 1, 20, 1])
    return [step(slots, nothing, first), step(slots, first, nothing + 1), step(slots, first + 1, mixed)]


def step(slots: IntArray, starts: IntArray, counts: IntArray) -> Step:
    return Step.pack(CONTEXTS, slots, starts, counts, starts + counts)


def own_ops(*arguments: Any) -> LayerOps:
    """Own kernels between torch's products, as large models have them."""
    shape = arguments[1]
    return choose_ops(shape, {torch.float32}, torch.device("cpu"))(*arguments)


WAYS = [None, own_ops, TorchOps]
"""Of a forward pass: whole in own kernels, between torch's products, and torch's alone."""


def logits_of(model: Qwen3ForCausalLM | LlamaForCausalLM, make_ops: MakeOps | None) -> list[Tensor]:
    runner = FusedRunner(model, max_length=64, kv_cache_bytes=2**22, make_ops=make_ops)
    runner.reserve(6, 64)
    with torch.inference_mode():
        return [runner.forward(step) for step in steps()]


@pytest.mark.skipif(load_kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("make_ops", WAYS[:2])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_own_kernels_and_torch_agree(kind: str, make_ops: MakeOps | None) -> None:
    model = make_model(kind)
    for own, right in zip(logits_of(model, make_ops), logits_of(model, TorchOps), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_ops", WAYS)
def test_logits_and_keys_are_those_of_token_by_token(make_ops: MakeOps | None) -> None:
    """The last layer is computed whole for last tokens only: what others leave in the cache is all that later ones see."""
    model = make_model("qwen3")
    runner = FusedRunner(model, max_length=64, kv_cache_bytes=2**22, make_ops=make_ops)
    runner.reserve(6, 64)
    contexts = torch.from_numpy(CONTEXTS[:, :12])
    with torch.inference_mode():
        right = model(contexts).logits
        chunk = np.array([7, 5, 7, 5, 7, 5])
        first = Step.pack(CONTEXTS, np.arange(6), np.zeros(6, np.int64), chunk, np.full(6, 7))
        torch.testing.assert_close(runner.forward(first), right[::2, 6], rtol=1e-4, atol=1e-4)
        unended = Step.pack(CONTEXTS, np.arange(6), chunk, 11 - chunk, np.full(6, 12))
        assert runner.forward(unended).shape == (0, 40)
        last = Step.pack(CONTEXTS, np.arange(6), np.full(6, 11), np.ones(6, np.int64), np.full(6, 12))
        torch.testing.assert_close(runner.forward(last), right[:, 11], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make_ops", WAYS)
def test_a_pass_in_blocks_is_the_whole_pass(monkeypatch: pytest.MonkeyPatch, make_ops: MakeOps | None) -> None:
    model = make_model("qwen3")
    whole = logits_of(model, make_ops)
    monkeypatch.setattr(fused_runner, "_BLOCK_TOKENS", 12)
    for cut, right in zip(logits_of(model, make_ops), whole, strict=True):
        torch.testing.assert_close(cut, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make_ops", WAYS)
def test_a_cache_that_could_grow_only_in_part_answers_as_before(
    monkeypatch: pytest.MonkeyPatch, make_ops: MakeOps | None
) -> None:
    model = make_model("qwen3")
    whole, torn = (FusedRunner(model, max_length=600, kv_cache_bytes=2**24, make_ops=make_ops) for _ in range(2))
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


@pytest.mark.skipif(load_kernels() is None, reason="no C compiler")
@pytest.mark.parametrize(("slot", "start"), [(20, 0), (0, 256)])
def test_a_step_beyond_the_cache_is_an_error_and_no_write_into_foreign_memory(slot: int, start: int) -> None:
    runner = FusedRunner(make_model("qwen3"), max_length=512, kv_cache_bytes=2**24)
    runner.reserve(6, 64)
    ids, one = np.zeros((30, 300), np.int64), np.ones(1, np.int64)
    with pytest.raises(IndexError, match="a cache of 8 slots of 256 tokens"):
        runner.forward(Step.pack(ids, one * slot, one * start, one, one * (start + 1)))


def test_blocks_hold_whole_rows_and_no_more_than_asked() -> None:
    blocks = list(steps()[0].cut(22))
    assert [block.counts.tolist() for block in blocks] == [[5, 17], [1], [30], [8], [21]]
    assert [block.last_tokens.tolist() for block in blocks] == [[4, 21], [0], [29], [7], [20]]
    assert all(block.rows.min() == 0 for block in blocks)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 32), (torch.float32, 12)])
def test_what_the_kernels_are_not_made_for_runs_on_torch(dtype: torch.dtype, head_dim: int) -> None:
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=1.0, eps=1e-6)
    assert choose_ops(shape, {dtype}, torch.device("cpu")) is TorchOps
