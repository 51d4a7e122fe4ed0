from __future__ import annotations

import asyncio
import copy
import logging
from functools import partial

import numpy as np
import pytest
import torch
from server_contract import assert_logprobs
from toy_model import toy_model
from toy_transfer import transfer_of
from transformers import (
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from turnwise.errors import ConfigError, ModelError, NotAvailableError, ServerError
from turnwise.inference.embedded.runner import GenericRunner
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.runtime.schedule_log import Admissions, ScheduleLog
from turnwise.types import SamplingParams, VersionRun


def make_model(seed: int = 0) -> PreTrainedModel:
    return toy_model(seed, vocab_size=50, max_position_embeddings=128)


@pytest.fixture
def server() -> EmbeddedServer:
    return EmbeddedServer(make_model())


async def play(server: EmbeddedServer, name: str, num_turns: int) -> list[int]:
    context = [len(name), 1, 2]
    for turn in range(num_turns):
        completion = await server.generate(context, SamplingParams(3, seed=turn), name)
        context += [*completion.token_ids.tolist(), turn]
    await server.release(name)
    return context


async def test_a_driver_that_breaks_leaves_nobody_waiting() -> None:
    class FullDisk(ScheduleLog):
        def stepped(self, admissions: Admissions) -> None:
            raise OSError("No space left on device")

    server = EmbeddedServer(make_model(), schedule_log=FullDisk())
    with pytest.raises(ServerError, match="the engine broke off while 'a' waited for it: No space left"):
        await asyncio.wait_for(server.generate([1, 2], SamplingParams(3), "a"), 60.0)
    await server.release("a")
    assert not server._engine.has_work


async def test_callers_that_are_ready_decode_together(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    step = server._engine.step

    def counted() -> list:
        finished = step()
        sizes.append(server._engine.num_running + len(finished))
        return finished

    monkeypatch.setattr(server._engine, "step", counted)
    await asyncio.gather(*(play(server, f"c{index}", 4) for index in range(10)))
    assert sizes == [10] * 12


async def test_one_schedule_gives_bit_identical_results() -> None:
    sampling = [SamplingParams(3 + index, seed=index) for index in range(6)]
    results = []
    for server in (EmbeddedServer(make_model()), EmbeddedServer(make_model())):
        completions = await asyncio.gather(
            *(server.generate([1, 2, s.seed], s, str(s.seed)) for s in sampling)
        )
        results.append([completion.logprobs.tolist() for completion in completions])
    assert results[0] == results[1]


def test_a_server_outlives_an_event_loop(server: EmbeddedServer) -> None:
    assert asyncio.run(play(server, "a", 2)) == asyncio.run(play(server, "a", 2))


async def test_a_cancelled_caller_frees_its_place(server: EmbeddedServer) -> None:
    task = asyncio.create_task(server.generate([1], SamplingParams(100), "a"))
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert server._engine.num_running == 0
    assert len((await server.generate([1], SamplingParams(2), "a")).token_ids) == 2


async def test_a_model_error_fails_the_batch_and_not_the_server(server: EmbeddedServer) -> None:
    expected = await server.generate([1, 2], SamplingParams(3), "a")
    old = server.model.state_dict()["model.norm.weight"].clone()

    async def set_norm(weight: torch.Tensor, version: int) -> None:
        await server.suspend()
        server.model.state_dict()["model.norm.weight"].copy_(weight)
        await server.resume(version)

    await set_norm(torch.full_like(old, torch.nan), 1)
    asked = (server.generate([1, 2, 3], SamplingParams(3), name) for name in "ab")
    failures = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(failure, ServerError) and "diverged" in str(failure) for failure in failures)
    await set_norm(old, 2)
    again = await server.generate([1, 2], SamplingParams(3), "a")
    assert again.token_ids.tolist() == expected.token_ids.tolist()


async def test_suspending_waits_for_running_requests_and_holds_new_ones(server: EmbeddedServer) -> None:
    running = asyncio.create_task(server.generate([1], SamplingParams(30), "a"))
    for _ in range(8):
        await asyncio.sleep(0)
    late = asyncio.create_task(server.generate([1], SamplingParams(3), "b"))
    await server.suspend("finish")
    assert server._engine.num_running == 0
    assert (await running).versions[0].num_tokens == 30
    await server.resume(1)
    assert (await late).versions[-1].version == 1


def test_the_generic_path_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    )
    with caplog.at_level(logging.WARNING, "turnwise.inference.embedded.server"):
        first = asyncio.run(play(EmbeddedServer(model.train(), max_length=64), "a", 2))
    assert [record.message.count("GPT2LMHeadModel") for record in caplog.records] == [1]
    assert model.training, "sampling left the model as it found it"
    assert first == asyncio.run(play(EmbeddedServer(model.eval(), max_length=64), "a", 2)), "dropout was off"
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        EmbeddedServer(model, max_length=64, kv_cache_bytes=1000)


def test_the_generic_path_keeps_its_bound_where_heads_are_wide() -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 32, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    model = GemmaForCausalLM(GemmaConfig(**shape, **heads, max_position_embeddings=64))
    runner = GenericRunner(model, max_length=64, kv_cache_bytes=1_000_000)
    cache: DynamicCache = model(torch.ones(1, 64, dtype=torch.long), use_cache=True).past_key_values
    num_bytes = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert runner.max_slots == 1_000_000 // num_bytes


async def test_sleep_frees_the_cache_only(server: EmbeddedServer) -> None:
    context = await play(server, "a", 2)
    await server.sleep(["kv_cache"])
    assert server._engine._runner._cache.num_slots == 0
    await server.wake(["kv_cache"])
    assert await play(server, "a", 2) == context
    with pytest.raises(NotAvailableError, match="weights"):
        await server.sleep(["weights"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
async def test_transfer_makes_servers_sample_from_the_trainer_s_weights(dtype: torch.dtype) -> None:
    trainer, copied = make_model(), copy.deepcopy(make_model()).to(dtype)
    servers = [EmbeddedServer(trainer, reads_trainer=True), EmbeddedServer(copied)]
    transfers = [transfer_of([server], trainer.named_parameters) for server in servers]
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.05)
    context, sampling = [1, 2, 3], SamplingParams(6)
    for version in (1, 2):
        trainer(torch.tensor([context]), labels=torch.tensor([context])).loss.backward()
        optimizer.step()
        for transfer in transfers:
            await transfer.update(version)
        completions = [await server.generate(context, sampling, "c") for server in servers]
        for completion in completions:
            assert completion.versions == (VersionRun(version, 6),)
            assert_logprobs(trainer, context, completion, sampling)
        context = [*context, *completions[0].token_ids.tolist(), 4]
    assert not any(parameter.is_inference() for parameter in trainer.parameters())


async def test_a_transfer_that_does_not_fit_is_refused(server: EmbeddedServer) -> None:
    for name, message in (("model.norm.bias", "doesn't fit"), ("model.norm.weight", "gave no values")):
        transfer = transfer_of([server], partial(list, [(name, torch.zeros(32))]))
        with pytest.raises(ModelError, match=message):
            await transfer.update(1)


def test_training_goes_on_after_sampling(server: EmbeddedServer) -> None:
    model = server.model
    context = asyncio.run(play(server, "a", 2))
    model(torch.tensor([context]), labels=torch.tensor([context])).loss.backward()
    assert all(np.isfinite(parameter.grad.numpy()).all() for parameter in model.parameters())
