"""Gradient checkpointing changes memory, never what is sampled from the model between two steps."""

from __future__ import annotations

import asyncio

import pytest
from server_contract import assert_logprobs
from strategy_contract import WeightedLoss
from toy_model import toy_batches, toy_model, toy_samples
from transformers import PreTrainedModel

from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.models.fused import supports_fast_path
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import SamplingParams


async def play_two_turns(server: EmbeddedServer | HFServer, model: PreTrainedModel) -> None:
    await server.resume(1)
    context, sampling = [3, 1, 4, 1, 5], SamplingParams(6)
    for _ in range(2):
        completion = await server.generate(context, sampling, "conversation")
        assert_logprobs(model, context, completion, sampling)
        context += [*completion.token_ids.tolist(), 7, 8, 9]
    await server.close()


@pytest.mark.parametrize("server_class", [EmbeddedServer, HFServer])
def test_the_model_s_own_cache_serves_after_a_step(server_class: type) -> None:
    model = toy_model(hidden_act="gelu")
    assert not supports_fast_path(model)
    strategy = TorchStrategy(model, StrategySettings(OptimizerSettings(1e-3), is_gradient_checkpointing=True))
    strategy.train_step(toy_batches(toy_samples(3)), WeightedLoss())
    asyncio.run(play_two_turns(server_class(model), model))
