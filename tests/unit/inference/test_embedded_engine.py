from __future__ import annotations

import numpy as np
import pytest
import torch
from counting_engine import CountingRunner, run
from toy_model import toy_model

from turnwise.errors import ConfigError, ServerError
from turnwise.inference.embedded import cache
from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.engine import Engine
from turnwise.inference.request import Request
from turnwise.types import SamplingParams

VOCAB = 50
SIZES = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}
SLOT_BYTES = 2 * 2 * 2 * 8 * 4 * 512  # keys and values × layers × kv heads × head dim × fp32 × max_length


def make_engine(
    num_slots: int = 16, max_concurrency: int = 16, max_step_tokens: int = 10_000
) -> tuple[Engine, CountingRunner]:
    model = toy_model(vocab_size=VOCAB, max_position_embeddings=512)
    runner = CountingRunner(model, max_length=512, kv_cache_bytes=num_slots * SLOT_BYTES)
    return Engine(
        runner, max_length=512, max_concurrency=max_concurrency, max_step_tokens=max_step_tokens
    ), runner


def request(request_id: str, prompt: list[int], max_new_tokens: int = 3, seed: int = 0) -> Request:
    return Request(request_id, np.array(prompt, np.int64), SamplingParams(max_new_tokens, seed=seed))


def sampled(engine: Engine) -> dict[str, list[int]]:
    return {name: finished.request.token_ids.tolist() for name, finished in run(engine).items()}


def ask(engine: Engine, request_id: str, prompt: list[int], max_new_tokens: int = 3) -> list[int]:
    engine.add(request(request_id, prompt, max_new_tokens))
    return sampled(engine)[request_id]


def test_the_next_turn_computes_only_its_new_tokens() -> None:
    engine, runner = make_engine()
    context = list(range(20))
    context += ask(engine, "a", context)
    ask(engine, "a", [*context, 7, 8])
    # The token sampled last has no keys yet: it is computed with the two new ones.
    assert [len(step.token_ids) for step in runner.steps] == [20, 1, 1, 3, 1, 1]
    assert runner.steps[3].starts.tolist() == [22]


def test_new_prompts_and_running_rows_share_a_forward_pass() -> None:
    engine, runner = make_engine()
    engine.add(request("a", [1, 2, 3]))
    engine.step()
    engine.add(request("b", [4, 5]))
    run(engine)
    assert runner.counts == [[3], [1, 2], [1, 1], [1]]


def test_a_long_queue_is_computed_within_the_step_budget() -> None:
    engine, runner = make_engine(max_step_tokens=10)
    for index in range(6):
        engine.add(request(f"r{index}", [index] * 6, max_new_tokens=1))
    run(engine)
    assert runner.counts == [[6, 4], [2, 6, 2], [4, 6], [6]]


def test_conversations_beyond_the_bound_evict_the_least_recently_used() -> None:
    engine, runner = make_engine(num_slots=2)
    prompts = {
        name: np.random.default_rng(seed).integers(0, VOCAB, 15).tolist() for seed, name in enumerate("abc")
    }
    alone = {name: ask(make_engine()[0], name, prompt) for name, prompt in prompts.items()}
    for name in "ab":
        assert ask(engine, name, prompts[name]) == alone[name]
    ask(engine, "a", [*prompts["a"], 1])
    assert ask(engine, "c", prompts["c"]) == alone["c"]
    runner.steps.clear()
    ask(engine, "a", [*prompts["a"], 1, 2])
    assert len(runner.steps[0].token_ids) < 4, "a was used after b, so it kept its slot"
    runner.steps.clear()
    assert ask(engine, "b", prompts["b"]) == alone["b"]
    assert len(runner.steps[0].token_ids) == 15, "b was evicted"


def test_requests_wait_while_all_slots_run() -> None:
    engine, runner = make_engine(num_slots=3, max_concurrency=2)
    crowd, _ = make_engine()
    for index in range(7):
        for each in (engine, crowd):
            each.add(request(f"r{index}", [index, 1, 2], seed=index))
    assert sampled(engine) == sampled(crowd)
    assert max(len(step.slots) for step in runner.steps) == 2


def test_the_cache_grows_with_the_context_and_keeps_what_it_holds() -> None:
    engine, _ = make_engine(num_slots=9)
    ids = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
    ask(engine, "a", ids[:200])
    others = [ask(engine, f"o{index}", ids[index : index + 5]) for index in range(8)]
    assert ask(engine, "a", ids) == ask(make_engine()[0], "fresh", ids)
    assert others == [ask(make_engine()[0], "fresh", ids[index : index + 5]) for index in range(8)]


def test_a_failed_pass_leaves_those_that_wait_and_what_idle_ones_have_cached() -> None:
    engine, runner = make_engine(max_concurrency=1)
    expected = ask(make_engine()[0], "other", [1, 2, 3])
    idle = ask(engine, "idle", [4, 5, 6])
    assert ask(engine, "a", [1, 2, 3]) == expected
    engine.add(request("a", [1, 2, 3, 4]))
    for name in ("b", "c"):
        engine.add(request(name, [1, 2, 3]))
    runner.is_broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert [failed.request_id for failed in engine.fail_running()] == ["a"]
    runner.is_broken = False
    assert sampled(engine) == {"b": expected, "c": expected}
    runner.steps.clear()
    ask(engine, "idle", [4, 5, 6, *idle, 7], max_new_tokens=1)
    assert len(runner.steps[0].token_ids) == 2, "the token sampled last and the new one"


def test_a_conversation_has_one_request_at_a_time() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(ServerError, match="already has a request"):
        engine.add(request("a", [1]))
    engine.step()
    with pytest.raises(ServerError, match="already has a request"):
        engine.add(request("a", [1]))


def test_non_finite_logits_are_an_error() -> None:
    engine, runner = make_engine()
    with torch.no_grad():
        runner._final_norm.fill_(torch.nan)
    runner.refresh()
    engine.add(request("a", [1]))
    with pytest.raises(FloatingPointError, match="diverged"):
        engine.step()


def test_a_bound_below_one_sequence_is_refused_with_the_arithmetic() -> None:
    assert KVCache(**SIZES, max_length=512, num_bytes=SLOT_BYTES).max_slots == 1
    with pytest.raises(ConfigError, match=r"256 bytes per token × 512 tokens = 131,072"):
        KVCache(**SIZES, max_length=512, num_bytes=SLOT_BYTES - 1)


@pytest.mark.parametrize("then", [[(16, 256)], [(8, 512), (16, 512)]])
def test_a_cache_that_memory_was_too_short_for_grows_the_rest_next_time(
    monkeypatch: pytest.MonkeyPatch, then: list[tuple[int, int]]
) -> None:
    kv_cache = KVCache(**SIZES, max_length=512, num_bytes=64 * SLOT_BYTES)
    real, num_left = cache._grown, iter([True, True, False])

    def grown(*arguments):
        if not next(num_left, True):
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(cache, "_grown", grown)
    with pytest.raises(MemoryError):
        kv_cache.reserve(16, 256)
    for num_slots, length in then:
        kv_cache.reserve(num_slots, length)
    assert {tensor.shape for tensor in (*kv_cache.keys, *kv_cache.values)} == {(16, 2, then[-1][1], 8)}


def test_rows_scattered_over_the_slots_attend_to_their_own_cache() -> None:
    """Few running rows far apart are gathered; many close together are computed in place. Both give the same
    tokens."""
    prompts = [np.random.default_rng(index).integers(0, VOCAB, 5 + index).tolist() for index in range(12)]
    budgets = [20, *(2 + index // 3 for index in range(1, 11)), 20]
    engine, runner = make_engine()
    for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        engine.add(request(f"r{index}", prompt, budget, seed=index))
    together = sampled(engine)
    assert min(len(step.slots) for step in runner.steps) == 2
    for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        alone, _ = make_engine()
        alone.add(request("x", prompt, budget, seed=index))
        assert sampled(alone)["x"] == together[f"r{index}"]
