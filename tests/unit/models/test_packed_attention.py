from __future__ import annotations

import pytest
import torch
from toy_model import VOCAB_SIZE, toy_model

from turnwise.errors import ModelError
from turnwise.models.packed_attention import PackedSequences, packed_attention, supports_packing

LENGTHS = (5, 17, 1, 9, 9)


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
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
    got, _ = packed_attention(torch.nn.Identity(), *tensors, None, scaling=8**-0.5, sliding_window=window, sequences=sequences)
    expected = reference(*tensors, window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    probe = torch.randn(expected.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad((got * probe).sum(), tensors), torch.autograd.grad((expected * probe).sum(), tensors), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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
