from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from toy_model import toy_batches, toy_model, toy_samples

from turnwise.errors import NotAvailableError
from turnwise.models.forward import make_forward
from turnwise.types import Batch

SAMPLES = toy_samples(5)
OUTPUTS = frozenset({"logprobs", "entropy"})
MODELS: list[dict[str, Any]] = [
    {},
    {"model_type": "qwen2", "tie_word_embeddings": False},
    {"model_type": "llama"},
    {"model_type": "mistral", "sliding_window": 6},
    {"attn_implementation": "sdpa"},
    {"attn_implementation": "eager"},
    {"model_type": "cohere", "logit_scale": 0.3},
]


@torch.no_grad()
def one_by_one(model: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own forward call for each sample alone."""
    logprobs, entropies = [], []
    for sample in SAMPLES:
        ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.response_mask)
        log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, -1)
        logprobs.append(
            torch.cat([torch.zeros(1), log_p.gather(-1, ids[1:, None]).squeeze(-1)]).where(mask, 0)
        )
        entropies.append(torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)]).where(mask, 0))
    return torch.cat(logprobs), torch.cat(entropies)


def assert_outputs(model: Any, batch: Batch, expected: Sequence[torch.Tensor]) -> None:
    """Log-probs and entropies at temperature 0.8 are those expected, within the bounds of the project."""
    with torch.no_grad():
        got = make_forward(model, temperature=0.8)(batch.map(torch.as_tensor), OUTPUTS)
    for value, right in zip((got.logprobs, got.entropy), expected, strict=True):
        assert (value - right).abs().mean() <= 1e-6
        assert (value - right).abs().max() <= 1e-4


@pytest.mark.parametrize("settings", MODELS, ids=lambda s: "-".join(map(str, s.values())) or "qwen3")
def test_a_batch_equals_each_sample_alone(settings: dict[str, Any]) -> None:
    model = toy_model(**settings)
    plain = model if "sliding_window" not in settings else toy_model(**settings, attn_implementation="eager")
    expected = one_by_one(plain, 0.8)
    assert all(numbers.abs().max() > 0.5 for numbers in expected)
    assert_outputs(model, toy_batches(SAMPLES)[0], expected)


@pytest.mark.parametrize("settings", [MODELS[0], MODELS[4], MODELS[6]], ids=["packed", "padded", "cohere"])
def test_tokens_with_a_temperature_of_their_own_are_scored_at_it(settings: dict[str, Any]) -> None:
    model, samples = toy_model(**settings), [replace(sample) for sample in SAMPLES]
    for sample in samples[1:3]:
        sample.temperatures = np.where(sample.response_mask, 1.3, 0).astype(np.float32)
    samples[2].temperatures[: samples[2].num_tokens // 2] = 0
    batch = toy_batches(samples)[0]
    is_hot = torch.tensor(batch.temperatures > 0)
    assert 0 < is_hot.sum() < batch.response_mask.sum()
    pairs = zip(one_by_one(model, 1.3), one_by_one(model, 0.8), strict=True)
    assert_outputs(model, batch, [hot.where(is_hot, cold) for hot, cold in pairs])


def test_heads_that_change_their_logits_are_found() -> None:
    assert make_forward(toy_model()).has_plain_head
    assert not make_forward(toy_model(model_type="cohere", logit_scale=0.3)).has_plain_head
    capped = toy_model(model_type="gemma2", final_logit_softcapping=30.0)
    assert not make_forward(capped).has_plain_head, "though its logits are far below the cap"


def test_values_come_from_a_value_head_alone() -> None:
    with pytest.raises(
        NotAvailableError, match=r"gives entropy and full_logprobs and logprobs, but no values.*critic"
    ):
        make_forward(toy_model())(toy_batches(SAMPLES)[0].map(torch.as_tensor), frozenset({"values"}))
