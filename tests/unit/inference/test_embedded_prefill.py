from __future__ import annotations

import asyncio
import gc
import tracemalloc
from copy import deepcopy

import numpy as np
import pytest
from counting_engine import CountingRunner, run
from hypothesis import given, settings, strategies as st
from server_contract import assert_frozen, assert_logprobs, perturb
from toy_model import toy_model
from transformers import PreTrainedModel

from turnwise.errors import ServerError
from turnwise.inference.embedded import decoder_layer
from turnwise.inference.embedded.engine import Engine
from turnwise.inference.embedded.fused_runner import FusedRunner
from turnwise.inference.embedded.prefill import PrefixIndex
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.request import Finished, Request
from turnwise.types import SamplingParams

VOCAB = 50


def make_model() -> PreTrainedModel:
    return toy_model(vocab_size=VOCAB, max_position_embeddings=2048)


MODEL = make_model()


def make_engine(max_step_tokens: int = 10_000) -> tuple[Engine, CountingRunner]:
    runner = CountingRunner(MODEL, max_length=2048, kv_cache_bytes=2**25)
    return Engine(runner, max_length=2048, max_concurrency=64, max_step_tokens=max_step_tokens), runner


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def add(engine: Engine, name: str, prompt_ids: list[int], max_new_tokens: int = 4, seed: int = 0) -> None:
    engine.add(Request(name, np.array(prompt_ids, np.int64), SamplingParams(max_new_tokens, seed=seed)))


def run_checked(engine: Engine) -> dict[str, Finished]:
    """As `run`. All log-probs are those of a plain forward pass."""
    finished = run(engine)
    for request, reason, version in finished.values():
        completion = request.completion(reason, version, 0.0)
        assert_logprobs(MODEL, request.prompt_ids.tolist(), completion, request.sampling)
    return finished


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_no_context_shares_more_than_a_neighbour(contexts: list[list[int]], data: st.DataObject) -> None:
    index = PrefixIndex()
    for slot, context in enumerate(contexts):
        index.put(slot, np.array(context))
    for slot in data.draw(st.sets(st.integers(0, len(contexts) - 1))):
        index.put(slot, np.array(contexts[slot][::-1]))
        contexts[slot].reverse()
    gone = data.draw(st.sets(st.integers(0, len(contexts) - 1)))
    for slot in gone:
        index.discard(slot)
    asked = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))

    def shared(slot: int) -> int:
        pairs = list(zip(asked, contexts[slot], strict=False))
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))

    for own in range(len(contexts)):
        others = set(range(len(contexts))) - gone - {own}
        found = index.neighbours(own, np.array(asked))
        assert set(found) <= others
        if own in gone:
            assert max(map(shared, found), default=0) == max(map(shared, others), default=0)


@pytest.mark.parametrize("may_be_native", [True, False])
def test_rows_that_stand_still_over_an_update(may_be_native: bool) -> None:
    """They keep their keys of the old weights, wherever these lie; prompts are begun anew; nobody else reads
    any of it."""
    model = make_model()
    old, common, sampling = deepcopy(model), prompt(32), SamplingParams(20)
    runner = FusedRunner(model, max_length=2048, kv_cache_bytes=2**25, may_be_native=may_be_native)
    engine = Engine(runner, max_length=2048, max_concurrency=64, max_step_tokens=60)
    asked = {"lender": common, "a": [*common, *prompt(5, 1)], "b": [*common, *prompt(9, 2)]}
    asked["waiting"] = asked["a"]
    for name, num_steps in (("lender", 20), ("a", 0), ("b", 5), ("lender", 1), ("waiting", 0)):
        add(engine, name, asked[name], sampling.max_new_tokens)
        for _ in range(num_steps):
            engine.step()
        if (
            name == "b"
        ):  # The first two read the lender's slot, which the lender's next prompt is computed in.
            asked["lender"] = [*common, *prompt(150, 3)]
    with pytest.raises(ServerError, match="requests are running; suspend the server"):
        engine.update(1)
    engine.is_frozen = True
    assert engine.num_running == 3 and not engine.has_work
    perturb(model)
    engine.update(1)
    engine.is_frozen = False
    finished = run(engine)
    for name, item in finished.items():
        completion = item.request.completion(item.reason, item.version, 0.0)
        assert [run.version for run in completion.versions] == ([0, 1] if name in "ab" else [1])
        assert_frozen(old, model, asked[name], completion, sampling)
    for name in "ab":
        asked[name] = [*asked[name], *finished[name].request.token_ids.tolist(), 7]
        add(engine, name, asked[name], sampling.max_new_tokens)
    for name, item in run(engine).items():
        assert_logprobs(model, asked[name], item.request.completion(item.reason, item.version, 0.0), sampling)


def test_siblings_compute_their_prompt_once() -> None:
    engine, runner = make_engine()
    for index in range(5):
        add(engine, f"r{index}", prompt(40), seed=index)
    finished = run_checked(engine)
    assert runner.counts == [[40], [1] * 5, [1] * 5, [1] * 5, [1] * 4]
    alone, _ = make_engine()
    add(alone, "x", prompt(40), seed=3)
    assert run(alone)["x"].request.token_ids.tolist() == finished["r3"].request.token_ids.tolist()


def test_contexts_that_share_their_beginning_compute_the_rest() -> None:
    engine, runner = make_engine()
    for index in range(4):
        add(engine, f"r{index}", prompt(30) + prompt(5 + index, seed=9 + index), seed=index)
    run_checked(engine)
    assert runner.counts[:2] == [[35], [1, 6, 7, 8]]


def test_a_context_begins_with_what_an_earlier_conversation_left() -> None:
    engine, runner = make_engine()
    add(engine, "first", prompt(50))
    run(engine)
    engine.release("first")
    add(engine, "unrelated", prompt(20, seed=1))
    add(engine, "other", prompt(50) + prompt(3, seed=2))
    runner.steps.clear()
    run_checked(engine)
    # The slot that was freed went to `unrelated`, and what it held with it.
    assert runner.counts[0] == [20, 53]
    add(engine, "next", prompt(50) + prompt(4, seed=3))
    runner.steps.clear()
    run_checked(engine)
    assert runner.counts[0] == [4]
    engine.update(1)
    add(engine, "new weights", prompt(50))
    runner.steps.clear()
    run(engine)
    assert runner.counts[0] == [50]


def test_siblings_of_an_aborted_request_go_on_alone() -> None:
    engine, runner = make_engine(max_step_tokens=16)
    for index in range(3):
        add(engine, f"r{index}", prompt(40), seed=index)
    engine.step()
    engine.abort("r0")
    assert run_checked(engine).keys() == {"r1", "r2"}
    # What the aborted one had computed, the first 16 tokens, is used; copying the last 8 wouldn't be worth a
    # wait.
    assert runner.counts[:3] == [[16], [16], [8, 8]]


def test_a_long_prompt_does_not_hold_up_decoding() -> None:
    engine, runner = make_engine(max_step_tokens=16)
    add(engine, "decoding", prompt(10, seed=1), max_new_tokens=6)
    engine.step()
    add(engine, "long", prompt(50))
    run_checked(engine)
    assert runner.counts == [[10], [1, 15], [1, 15], [1, 15], [1, 5], [1, 1], [1], [1]]


def test_prompts_longer_than_a_piece_and_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_layer, "_PIECE", 64)
    monkeypatch.setattr(decoder_layer, "_BLOCK", 64 * 100)
    monkeypatch.setattr(decoder_layer, "_STORED_MASK", 1000)
    engine, _ = make_engine(max_step_tokens=300)
    lengths = (1, 3, 40, 50, 60, 200, 333)
    for index, length in enumerate(lengths):
        add(engine, f"r{index}", prompt(length, seed=index), seed=index)
    run_checked(engine)


async def converse(server: EmbeddedServer, index: int) -> None:
    """Three turns, of which each may be cancelled at any moment."""
    rng = np.random.default_rng(index)
    context = prompt(20, seed=index % 3)
    for turn in range(3):
        sampling = SamplingParams(int(rng.integers(1, 6)), seed=turn)
        task = asyncio.create_task(server.generate(context, sampling, str(index)))
        for _ in range(int(rng.integers(1, 30))):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            break
        context = [*context, *task.result().token_ids.tolist(), *prompt(4, seed=turn)]
    await server.release(str(index))


def make_crowded_server() -> EmbeddedServer:
    return EmbeddedServer(
        MODEL, max_length=256, max_concurrency=7, max_step_tokens=24, kv_cache_bytes=9 * 2**16
    )


async def test_nothing_leaks() -> None:
    """Conversations come, are cancelled at any moment, and go, while weights are updated: nothing is left of
    them."""
    server = make_crowded_server()
    conversations = [asyncio.create_task(converse(server, index)) for index in range(60)]
    for version in range(1, 5):
        for _ in range(100):
            await asyncio.sleep(0)
        await server.suspend("abort")
        await server.resume(version)
    await asyncio.gather(*conversations)
    engine = server._engine
    scheduler, prefill = engine._scheduler, engine._prefill
    assert not (
        engine.num_running or scheduler.waiting or server._futures or prefill.slots or scheduler.slots
    )
    assert sorted(scheduler._free) == list(range(9))
    assert len(prefill._index._keys) == len(prefill._index._key_of) <= 9
    assert engine._runner._cache.num_slots <= 9


@pytest.mark.extra
def test_memory_stays_flat() -> None:
    """What later conversations leave behind, in bytes of Python's objects: the minutes are
    `benchmarks/soak.py`'s."""

    async def crowd(server: EmbeddedServer, first: int) -> int:
        await asyncio.gather(*(converse(server, index) for index in range(first, first + 60)))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async def scenario() -> list[int]:
        server = make_crowded_server()
        return [await crowd(server, 60 * number) for number in range(12)]

    tracemalloc.start()
    try:
        sizes = asyncio.run(scenario())
    finally:
        tracemalloc.stop()
    # Most of what is kept on purpose is there after 360 conversations; 50 bytes for each of 360 more would be
    # more than this.
    assert sizes[-1] - sizes[5] < 15_000
