"""Servers with a model of their own: the sampler's dtype isn't the trainer's, or it keeps a policy for
several steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from server_contract import assert_logprobs, reference_logprobs
from strategy_contract import WeightedLoss
from toy_model import toy_batches, toy_model, toy_samples
from toy_transfer import transfer_of
from transformers import PreTrainedModel

from turnwise.errors import DeadlineError
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.models.fused import fuse_projections, fused, qkv
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
from turnwise.testing.fakes import ScriptedServer
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Completion, SamplingParams, VersionRun

BATCHES = toy_batches(toy_samples(3))
SAMPLING = SamplingParams(12, seed=3)
PROMPT = [3, 1, 4, 1, 5]


def make_trainer(**config: bool) -> TorchStrategy:
    """Trains through fused projections, as the pipeline's does."""
    model = toy_model(**config)
    fuse_projections(model)
    return TorchStrategy(model, StrategySettings(OptimizerSettings(0.02)))


async def ask(server: EmbeddedServer, turn: int = 0) -> Completion:
    return await server.generate([*PROMPT, turn], SAMPLING, "conversation")


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("is_tied", [True, False])
async def test_a_bf16_sampler_gets_every_weight_and_agrees_with_its_own_forward_pass(is_tied: bool) -> None:
    trainer = make_trainer(tie_word_embeddings=is_tied)
    sampler = toy_model(seed=1, tie_word_embeddings=is_tied).to(torch.bfloat16)
    server = EmbeddedServer(sampler)
    transfer = transfer_of([server], trainer.weights)
    for version in (1, 2):
        trainer.train_step(BATCHES, WeightedLoss())
        await transfer.update(version)
        expected = trainer.model.state_dict()
        for name, tensor in sampler.state_dict().items():
            assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name
        attention = sampler.model.layers[0].self_attn
        parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert torch.equal(fused(qkv(sampler.model.layers[0])).weight, torch.cat(parts))
        assert (sampler.lm_head.weight is sampler.model.embed_tokens.weight) is is_tied

        completion = await ask(server, turn=version)
        own = reference_logprobs(sampler, [*PROMPT, version], completion.token_ids, SAMPLING)
        exact = reference_logprobs(trainer.model, [*PROMPT, version], completion.token_ids, SAMPLING)
        assert np.abs(completion.logprobs - own).max() < 0.1
        assert 0 < np.abs(completion.logprobs - exact).max() < 0.3
    await server.close()


async def test_between_updates_a_sampler_stays_on_the_old_policy_while_the_trainer_moves() -> None:
    trainer, sampler = make_trainer(), toy_model(seed=1)
    server = EmbeddedServer(sampler)
    transfer = transfer_of([server], trainer.weights)
    await transfer.update(0)
    policy, first = tensors(sampler), await ask(server)
    assert_logprobs(trainer.model, [*PROMPT, 0], first, SAMPLING)
    for _ in range(3):
        trainer.train_step(BATCHES, WeightedLoss())
        again = await ask(server)
        assert again.token_ids.tolist() == first.token_ids.tolist()
        np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-5)
        assert again.versions == (VersionRun(0, len(again.token_ids)),)
    assert all(torch.equal(policy[name], tensor) for name, tensor in sampler.state_dict().items())
    assert (
        np.abs(
            reference_logprobs(trainer.model, [*PROMPT, 0], first.token_ids, SAMPLING) - first.logprobs
        ).max()
        > 1e-2
    )

    await transfer.update(3)
    moved = await ask(server)
    assert {run.version for run in moved.versions} == {3}
    assert_logprobs(trainer.model, [*PROMPT, 0], moved, SAMPLING)
    await server.close()


def test_a_transfer_that_hangs_in_this_process_is_named() -> None:
    def stuck() -> Iterator[tuple[str, torch.Tensor]]:
        threading.Event().wait()
        yield from ()

    sampler = toy_model()
    with WatchedRunner(Watchdog(grace_s=10.0, poll_s=0.01)) as runner:
        transfer = transfer_of([EmbeddedServer(sampler)], stuck, watchdog=runner.watchdog, timeout_s=0.05)
        with pytest.raises(DeadlineError) as caught:
            runner.run(transfer.update(3))
    first, *stacks = str(caught.value).splitlines()
    assert first == (
        "the pipeline waited 0.05 s for the weights of version 3 to reach the inference servers; "
        "raise deadlines.weights_s if that may take longer"
    )
    assert any("in stuck: threading.Event().wait()" in line for line in stacks)


def test_a_transfer_that_a_server_never_lets_through_is_named() -> None:
    class Busy(ScriptedServer):
        async def suspend(self, suspension: str = "finish") -> None:
            await asyncio.Event().wait()

    transfer = transfer_of([Busy([])], list, timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"(?s)the weights of version 3.*deadlines.weights_s.*in suspend"):
        asyncio.run(transfer.update(3))
