from __future__ import annotations

import logging

import pytest
from toy_model import toy_model, toy_value_model

from turnwise.errors import ConfigError
from turnwise.models.lora import freeze


def trained(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_parameters_whose_names_start_with_a_prefix_are_not_trained() -> None:
    model = toy_model(tie_word_embeddings=False)
    everything = trained(model)
    freeze(model, ["model.layers.0.", "model.embed"])
    assert everything - trained(model) == {
        n for n in everything if n.startswith(("model.layers.0.", "model.embed"))
    }
    freeze(model, [])
    assert "model.layers.1.mlp.up_proj.weight" in trained(model)


def test_a_prefix_that_names_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"starts with 'model.layer.0'.*Did you mean 'model.layers.0"):
        freeze(toy_model(), ["model.embed_tokens", "model.layer.0"])
    with pytest.raises(ConfigError, match=r"'transformer'; names start with model, "):
        freeze(toy_model(), ["transformer"])


def test_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="model, lm_head freeze every parameter"):
        freeze(toy_model(), ["model", "lm_head"])
    critic = toy_value_model()
    freeze(critic, ["model"])
    assert trained(critic) == {"score.weight", "score.bias"}


def test_tied_weights_are_said_to_be_frozen_with_their_twins(caplog: pytest.LogCaptureFixture) -> None:
    tied, untied = toy_model(), toy_model(tie_word_embeddings=False)
    with caplog.at_level(logging.WARNING, "turnwise"):
        freeze(untied, ["lm_head"])
        assert not caplog.records
        freeze(tied, ["lm_head"])
    assert "model.embed_tokens.weight" not in trained(tied)
    [record] = caplog.records
    assert "also freezes model.embed_tokens.weight: it is tied" in record.getMessage()
