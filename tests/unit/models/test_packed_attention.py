from __future__ import annotations

import pytest
import torch
from toy_model import VOCAB_SIZE, toy_model

from turnwise.errors import ModelError
from turnwise.models import packed_attention as packed
from turnwise.models.packed_attention import PackedSequences, packed_attention, supports_packing

LENGTHS = (5, 17, 1, 9, 9)


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Dense softmax over an explicit block mask."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.arange(sum(LENGTHS))
    distance = position[:, None] - position[None, :]
    visible = (sequence[:, None] == sequence[None, :]) & (distance >= 0) & (distance < (window or 10**6))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4, 100])
def test_packed_attention_equals_dense_attention_with_a_block_mask(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8)]
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    sequences = PackedSequences.of(LENGTHS, torch.device("cpu"))
    got, _ = packed_attention(
        torch.nn.Identity(), *tensors, None, scaling=8**-0.5, sliding_window=window, sequences=sequences
    )
    expected = reference(*tensors, window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    probe = torch.randn(expected.shape, generator=generator)
    own, right = (torch.autograd.grad((output * probe).sum(), tensors) for output in (got, expected))
    torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_groups", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_autocast_takes_the_kernels_of_a_gpu(monkeypatch, window: int | None, has_groups: bool) -> None:
    """Torch's varlen attention, here a stand-in with its signature: all in 16 bits, keys repeated where it
    needs that."""
    calls = []

    def varlen_attn(
        q, k, v, starts, same_starts, longest, same_longest, *, scale, window_size, enable_gqa=False
    ):
        assert starts is same_starts and longest == same_longest == max(LENGTHS)
        assert {tensor.dtype for tensor in (q, k, v)} == {torch.bfloat16}
        assert enable_gqa == has_groups and q.shape[1] == k.shape[1] * (2 if has_groups else 1)
        assert window_size == (-1 if window is None else window - 1, 0)
        calls.append(scale)
        query, key, value = (tensor.float().transpose(0, 1)[None] for tensor in (q, k, v))
        return reference(query, key, value, window)[0].to(q.dtype)

    monkeypatch.setattr(packed.varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(packed, "_has_varlen", lambda device: True)
    monkeypatch.setattr(packed, "_HAS_GROUPS", has_groups)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, sum(LENGTHS), 8, generator=generator)  # in fp32, as the rotation leaves it
    key = torch.randn(1, 2, sum(LENGTHS), 8, generator=generator)
    value = torch.randn(1, 2, sum(LENGTHS), 8, generator=generator).bfloat16()
    sequences = PackedSequences.of(LENGTHS, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = packed_attention(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            scaling=8**-0.5,
            sliding_window=window,
            sequences=sequences,
        )
    assert calls == [8**-0.5]
    torch.testing.assert_close(got.float(), reference(query, key, value.float(), window), rtol=0.1, atol=0.05)


def test_without_lengths_it_is_sdpa_so_that_generation_works() -> None:
    ids = torch.randint(1, VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    packed, sdpa = toy_model(), toy_model(attn_implementation="sdpa")
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(packed.generate(ids, **settings), sdpa.generate(ids, **settings))


def test_what_sdpa_cannot_compute_is_refused() -> None:
    tensors = [torch.zeros(1, 1, 2, 4)] * 3
    with pytest.raises(ModelError, match="eager"):
        packed_attention(torch.nn.Identity(), *tensors, None, softcap=30.0)


def test_recurrent_architectures_are_not_packed() -> None:
    assert supports_packing(toy_model())
    hybrid = toy_model(attn_implementation="sdpa")
    hybrid.config.layer_types = ["linear_attention", "full_attention"]
    assert not supports_packing(hybrid)
