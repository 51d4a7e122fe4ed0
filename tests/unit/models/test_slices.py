"""A model whose weights stay in its files computes what the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_model import toy_model, toy_value_model

from turnwise.models.slices import SlicedModel, open_slices

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
MODELS: dict[str, Any] = {
    "tied": toy_model,
    "qwen2": lambda: toy_model(model_type="qwen2", tie_word_embeddings=False),
    "llama": lambda: toy_model(model_type="llama"),
    "values": toy_value_model,
}


def opened(folder: Path, model: Any) -> SlicedModel:
    model.save_pretrained(folder)
    slices = open_slices(str(folder), has_value_head=hasattr(model, "score"))
    assert slices is not None
    return slices


def weights_in_memory(slices: SlicedModel) -> int:
    return sum(not parameter.is_meta for parameter in slices.model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_weights_that_are_read_in_turn_give_the_same_logits(make: Any, tmp_path: Path) -> None:
    """And no more than those of one module are in memory."""
    model = make()
    slices = opened(tmp_path, model)
    numbers: list[int] = []
    for module, _, _ in slices.places:
        module.register_forward_hook(lambda *_: numbers.append(weights_in_memory(slices)))
    with slices.read_in_turn():
        logits = slices.model(input_ids=TOKENS).logits
    assert torch.equal(logits, model(input_ids=TOKENS).logits)
    assert weights_in_memory(slices) == 0
    assert numbers and set(numbers) <= {0, 1, 2}


@torch.no_grad()
def test_weights_are_forgotten_where_a_call_fails(tmp_path: Path) -> None:
    slices = opened(tmp_path, toy_model())
    with pytest.raises(IndexError), slices.read_in_turn():
        slices.model(input_ids=torch.tensor([[10**6]]))
    assert weights_in_memory(slices) == 0
    with pytest.raises((NotImplementedError, RuntimeError)):
        slices.model(input_ids=TOKENS).logits.sum().item()
