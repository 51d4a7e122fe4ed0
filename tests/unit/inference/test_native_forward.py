"""A whole forward pass by own kernels: what transformers' models compute, the same to the last bit whatever
the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_model import toy_model
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.inference.embedded import fused_runner
from turnwise.inference.embedded.fused_runner import FusedRunner
from turnwise.inference.embedded.runner import PackedStep
from turnwise.models.cpu.build import load_kernels
from turnwise.types import IntArray

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C compiler")

# Sizes that no block and no panel divides.
SIZES = {
    "vocab_size": 37,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 24}
CONTEXTS = np.random.default_rng(0).integers(0, 37, (40, 100))


def make_model(model_type: str, is_tied: bool = False) -> PreTrainedModel:
    model = toy_model(model_type=model_type, attn_implementation="sdpa", tie_word_embeddings=is_tied, **SIZES)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def make_runner(model: PreTrainedModel, num_slots: int = 40) -> FusedRunner:
    runner = FusedRunner(model, max_length=100, kv_cache_bytes=2**26)
    runner.reserve(num_slots, 100)
    assert runner._native is not None
    return runner


def forward(runner: FusedRunner, slots: IntArray, starts: IntArray, counts: IntArray) -> Tensor:
    step = PackedStep.pack(CONTEXTS, slots, starts, counts, starts + counts)
    with torch.inference_mode():
        return runner.forward(step)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_logits_are_those_of_the_model(kind: str, num_rows: int) -> None:
    model = make_model(kind, is_tied=kind == "qwen2")
    runner, slots = make_runner(model), np.arange(num_rows)
    lengths = 1 + slots * 5 % 60
    with torch.inference_mode():
        right = model(torch.from_numpy(CONTEXTS)).logits
    torch.testing.assert_close(
        forward(runner, slots, slots * 0, lengths), right[slots, lengths - 1], rtol=2e-3, atol=2e-4
    )
    torch.testing.assert_close(
        forward(runner, slots, lengths, slots * 0 + 1), right[slots, lengths], rtol=2e-3, atol=2e-4
    )


def test_a_row_is_the_same_to_the_last_bit_whatever_the_batch_the_blocks_and_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, slots, ones = make_model("qwen3"), np.arange(40), np.ones(40, np.int64)
    whole, alone = make_runner(model), make_runner(model)
    lengths = 1 + slots * 7 % 60
    prompts, decoded = forward(whole, slots, slots * 0, lengths), forward(whole, slots, lengths, ones)
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(fused_runner, "_BLOCK_TOKENS", 16)
    try:
        for row in (0, 8, 39):
            torch.set_num_threads(1 + row % 3)
            one = slots[row : row + 1]
            # The prompt in two parts, then a token.
            half = lengths[one] // 2
            if half:
                forward(alone, one, one * 0, half)
            assert torch.equal(forward(alone, one, half, lengths[one] - half), prompts[one])
            assert torch.equal(forward(alone, one, lengths[one], ones[one]), decoded[one])
    finally:
        torch.set_num_threads(num_threads)


def test_new_weights_count_from_the_next_refresh_on() -> None:
    model, slot = make_model("qwen3"), np.zeros(1, np.int64)
    runner = make_runner(model)
    before = forward(runner, slot, slot, slot + 9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        right = model(torch.from_numpy(CONTEXTS[:1, :9])).logits[:, -1]
    assert torch.equal(forward(runner, slot, slot, slot + 9), before)
    runner.refresh()
    torch.testing.assert_close(forward(runner, slot, slot, slot + 9), right, rtol=2e-3, atol=2e-4)


def test_siblings_read_their_prompt_in_one_slot_and_lose_nothing_when_that_goes_on_to_another() -> None:
    model = make_model("llama")
    runner, slots = make_runner(model), np.arange(3)
    ids, starts, ones = CONTEXTS.copy(), np.full(3, 41), np.ones(3, np.int64)
    ids[1:3, :41] = ids[0, :41]
    with torch.inference_mode():
        right = model(torch.from_numpy(ids[:3, :43])).logits
        runner.forward(PackedStep.pack(ids, slots[:1], starts[:1] * 0, starts[:1], starts[:1]))
        for sibling in (1, 2):
            runner.usable_prefix(sibling, 0, 0)
            runner.copy_prefix(0, sibling, 0, 41)
        now = runner.forward(PackedStep.pack(ids, slots, starts, ones, starts + 1))
        torch.testing.assert_close(now, right[:, 41], rtol=2e-3, atol=2e-4)
        # Another conversation gets slot 0.
        runner.usable_prefix(0, 42, 3)
        ids[0, 3:] = CONTEXTS[7, 3:]
        runner.forward(PackedStep.pack(ids, slots[:1], starts[:1] * 0 + 3, starts[:1] + 4, starts[:1] + 7))
        now = runner.forward(PackedStep.pack(ids, slots[1:], starts[1:] + 1, ones[1:], starts[1:] + 2))
        torch.testing.assert_close(now, right[1:, 42], rtol=2e-3, atol=2e-4)


def test_large_models_run_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_runner, "MAX_PACKED_BYTES", 0)
    runner = FusedRunner(make_model("qwen3"), max_length=100, kv_cache_bytes=2**26)
    assert runner._native is None and runner.name == "fused"


@pytest.mark.parametrize(("slot", "start"), [(64, 0), (0, 128)])
def test_a_step_beyond_the_cache_is_an_error_and_no_write_into_foreign_memory(slot: int, start: int) -> None:
    runner = make_runner(make_model("qwen3"))
    ids = np.zeros((65, 200), np.int64)
    step = PackedStep.pack(
        ids, np.array([slot]), np.array([start]), np.ones(1, np.int64), np.array([start + 1])
    )
    with pytest.raises(IndexError, match="goes beyond a cache"):
        runner.forward(step)


def test_tokens_that_the_model_does_not_embed_are_an_error() -> None:
    runner, ids = make_runner(make_model("qwen3")), np.array([[37]])
    for token in (37, -1):
        ids[:] = token
        with pytest.raises(IndexError, match="token ids beyond the 37"):
            runner.forward(
                PackedStep.pack(
                    ids, np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1)
                )
            )


def test_a_model_that_left_its_dtype_is_refused() -> None:
    model = make_model("qwen3").to(torch.bfloat16)
    runner = FusedRunner(model, max_length=100, kv_cache_bytes=2**26)
    model.float()
    with pytest.raises(ModelError, match=r"served in torch\.bfloat16 on cpu and is now in torch\.float32"):
        runner.refresh()
