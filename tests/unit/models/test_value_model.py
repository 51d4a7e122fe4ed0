from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_model import toy_batches, toy_model, toy_samples, toy_value_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from turnwise.errors import ModelError, NotAvailableError
from turnwise.models.forward import make_forward
from turnwise.models.load import save_model
from turnwise.models.value_head import load_value_model, value_head
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy

SAMPLES = toy_samples(5)
OUTPUTS = frozenset({"values", "next_values"})
MODELS: list[dict[str, Any]] = [
    {},
    {"model_type": "qwen2", "tie_word_embeddings": False},
    {"model_type": "mistral", "sliding_window": 6, "attn_implementation": "eager"},
    {"attn_implementation": "sdpa"},
    {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "attn_implementation": "eager",
    },
]


@torch.no_grad()
def one_by_one(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own logits for each sample alone: at the position before each trained token, and at the
    token itself."""
    before, after = [], []
    for sample in SAMPLES:
        mask = torch.tensor(sample.response_mask)
        at = model(torch.tensor(sample.token_ids)[None]).logits[0, :, 0]
        before.append(torch.cat([torch.zeros(1), at[:-1]]).where(mask, 0))
        after.append(at.where(mask, 0))
    return torch.cat(before), torch.cat(after)


@pytest.mark.parametrize("settings", MODELS, ids=lambda s: "-".join(map(str, s.values())) or "qwen3")
def test_values_of_a_batch_are_those_of_each_sample_alone(settings: dict[str, Any]) -> None:
    model = toy_value_model(**settings)
    with torch.no_grad():
        got = make_forward(model)(toy_batches(SAMPLES)[0].map(torch.as_tensor), OUTPUTS)
    for value, expected in zip((got.values, got.next_values), one_by_one(model), strict=True):
        assert expected.abs().max() > 0.3
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


def test_values_say_nothing_of_what_comes_later() -> None:
    [batch] = toy_batches(SAMPLES[:1])
    strategy = TorchStrategy(toy_value_model())
    before = strategy.forward([batch], OUTPUTS)[0]
    batch.token_ids[-1] += 1
    after = strategy.forward([batch], OUTPUTS)[0]
    np.testing.assert_array_equal(before["values"], after["values"])
    assert before["next_values"][-1] != after["next_values"][-1]


def test_a_critic_has_no_log_probs() -> None:
    with pytest.raises(
        NotAvailableError, match="Qwen3ForTokenClassification gives next_values and values, but no logprobs"
    ):
        TorchStrategy(toy_value_model()).forward(toy_batches(SAMPLES), frozenset({"logprobs"}))


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2"])
def test_a_language_model_gets_a_head_that_is_zero(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """olmo2 has no token classification in transformers."""
    policy = toy_model(model_type=model_type)
    save_model(policy, None, tmp_path / "policy")
    with caplog.at_level(logging.INFO, "turnwise.models.value_head"):
        critic = load_value_model(tmp_path / "policy")
    assert "no value head" in caplog.text
    assert value_head(policy) is None and value_head(critic) is not None
    for name, tensor in policy.base_model.state_dict().items():
        assert torch.equal(tensor, critic.base_model.state_dict()[name]), name
    batches = toy_batches(SAMPLES)
    strategy = TorchStrategy(critic, StrategySettings(OptimizerSettings(1e-2)))
    assert not any(array.any() for array in strategy.forward(batches, OUTPUTS)[0].values())

    caplog.clear()
    with torch.no_grad():
        value_head(critic).weight.normal_()
    strategy.save(tmp_path / "critic")
    with caplog.at_level(logging.INFO, "turnwise.models.value_head"):
        again = load_value_model(tmp_path / "critic")
    assert "no value head" not in caplog.text
    for name, tensor in critic.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_saved_critic_is_a_folder_of_transformers(tmp_path: Path) -> None:
    model = toy_value_model()
    TorchStrategy(model).save(tmp_path / "critic")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    ids = torch.tensor(SAMPLES[0].token_ids)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_head_of_a_reward_model_is_kept(tmp_path: Path) -> None:
    config = toy_model().config
    config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(config)
    save_model(reward, None, tmp_path / "reward")
    head = value_head(load_value_model(tmp_path / "reward"))
    assert head is not None and torch.equal(head.weight, reward.score.weight) and not head.bias.any()


def test_what_is_no_value_model_is_refused(tmp_path: Path) -> None:
    save_model(toy_value_model(num_labels=3), None, tmp_path / "many")
    with pytest.raises(ModelError, match=r"score\.\w+ is 3.* in the weights and 1.* for one label, which"):
        load_value_model(tmp_path / "many")
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "encoder")
    with pytest.raises(ModelError, match="t5 model isn't a decoder"):
        load_value_model(tmp_path / "encoder")
    with pytest.raises(ModelError, match="no such model folder"):
        load_value_model(tmp_path / "none")
