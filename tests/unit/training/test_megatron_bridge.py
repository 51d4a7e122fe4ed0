"""What Megatron's ranks hold of a model is that model again when it is put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_model import toy_model, toy_value_model

from turnwise.errors import ConfigError
from turnwise.training.megatron.bridge import HEAD, Columns, Grouped, Rows, Stacked, places_of, trained_places

UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
MODELS = {
    "qwen3": toy_model,
    "qwen2": lambda: toy_model(model_type="qwen2", **UNTIED),
    "llama": lambda: toy_model(model_type="llama", **UNTIED),
    "mistral": lambda: toy_model(model_type="mistral"),
    "value": toy_value_model,
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parts_of_all_ranks_are_the_model(make: Any, size: int) -> None:
    model = make()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    joined: dict[str, torch.Tensor] = {}
    for place in places_of(model.config, tensors):
        whole = [tensors[name] for name in place.tensors]
        parts = [place.cut.part(whole, size, rank) for rank in range(size)]
        assert len({part.shape for part in parts}) == 1
        again = place.cut.joined(parts, [tensor.shape for tensor in whole])
        if not place.is_copy:
            joined.update(zip(place.tensors, again, strict=True))
    assert joined.keys() == tensors.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in tensors.items())


def test_a_tied_head_is_a_copy_of_the_embedding() -> None:
    model = toy_model()
    [head] = [p for p in places_of(model.config, dict(model.named_parameters())) if p.name == HEAD]
    assert head.is_copy and head.tensors == ("model.embed_tokens.weight",)


def test_groups_of_queries_lie_with_their_keys_and_values() -> None:
    """Two key-value heads of one row, each read by two queries."""
    queries, keys, values = torch.arange(4)[:, None], torch.tensor([[10], [11]]), torch.tensor([[20], [21]])
    parts = [Grouped(2).part([queries, keys, values], 2, rank).flatten().tolist() for rank in (0, 1)]
    assert parts == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_cuts() -> None:
    table = torch.arange(6).view(3, 2)
    assert Columns().part([table], 2, 1).flatten().tolist() == [1, 3, 5]
    assert Rows().part([table], 2, 1).tolist() == [[4, 5], [0, 0]]
    assert Stacked().part([table[:2], table[:2] + 10], 2, 1).tolist() == [[2, 3], [12, 13]]


def test_a_weight_without_a_place_is_named() -> None:
    model = toy_model()
    names = [*dict(model.named_parameters()), "model.layers.0.self_attn.sinks"]
    with pytest.raises(ConfigError, match="sinks"):
        places_of(model.config, names)


def test_what_lies_together_is_frozen_together() -> None:
    model = toy_model()
    names = list(dict(model.named_parameters()))
    places = places_of(model.config, names)
    flags = {name: not name.startswith("model.layers.0.") for name in names}
    trained = trained_places(places, flags)
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in trained
    assert not [name for name in trained if name.startswith("decoder.layers.0.")]
    flags["model.layers.1.self_attn.q_proj.weight"] = False
    with pytest.raises(ConfigError, match="k_proj"):
        trained_places(places, flags)
