from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from turnwise.inference.embedded import sampler
from turnwise.inference.embedded.sampler import Drawn, sample, uniforms
from turnwise.inference.embedded.slot_arrays import ROW, Rows
from turnwise.inference.request import Request
from turnwise.types import SamplingParams


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def who_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here holds for both."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "load_kernels", lambda: None)


def rows(count: int, **fields: object) -> np.ndarray:
    state = np.zeros(count, ROW)
    state["temperature"] = state["top_p"] = state["repetition_penalty"] = 1.0
    state["length"], state["prompt_length"] = 1, 1
    state["seed"] = np.arange(count)
    for name, value in fields.items():
        state[name] = value
    return state


def draw(logits: torch.Tensor, state: np.ndarray) -> Drawn:
    return sample(logits.clone(), state, np.zeros((len(state), 4), np.int64), np.arange(len(state)))


def test_uniforms_are_uniform_and_independent_over_seeds_and_counters() -> None:
    seeds, counters = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    numbers = uniforms(seeds.ravel(), counters.ravel()).reshape(300, 300)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = np.bincount((numbers.ravel() * 100).astype(int), minlength=100)
    chi_square = ((counts - 900) ** 2 / 900).sum()
    assert chi_square < 150, "99 degrees of freedom: beyond 150 once in a thousand"
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.015


def test_a_number_depends_on_its_seed_and_counter_alone() -> None:
    many = uniforms(np.arange(10, dtype=np.uint64), np.full(10, 4))
    assert uniforms(np.array([7], np.uint64), np.array([4]))[0] == many[7]
    assert len(set(uniforms(np.full(50, 2**63 - 1, np.uint64), np.arange(50)).tolist())) == 50


def test_frequencies_follow_a_mixed_batch_of_distributions() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(40_000, 1)
    state = rows(40_000)
    state["temperature"][10_000:20_000] = 0.5
    state["top_k"][20_000:30_000] = 2
    state["top_p"][30_000:] = 0.9
    tokens, logprobs, _ = draw(logits, state)
    probs = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]), -1).numpy()
    expected = [probs, probs**2, probs * [1, 1, 0, 0], probs * [1, 1, 1, 0]]
    for block, target in enumerate(expected):
        chosen = slice(block * 10_000, (block + 1) * 10_000)
        target = target / target.sum()
        frequencies = np.bincount(tokens[chosen], minlength=4) / 10_000
        assert np.abs(frequencies - target).max() < 0.015
        assert np.allclose(np.exp(logprobs[chosen]), target[tokens[chosen]], atol=1e-6)


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((20_000, 9), -torch.inf)
    logits[:, 3], logits[:, 6] = 0.0, 1.0
    tokens, _, _ = draw(logits, rows(20_000))
    assert set(tokens.tolist()) == {3, 6}


def test_greedy_rows_in_a_mixed_batch_take_the_best_with_logprob_0() -> None:
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(0))
    state = rows(64)
    state["is_greedy"][::2] = True
    tokens, logprobs, _ = draw(logits, state)
    assert tokens[::2].tolist() == logits.argmax(-1)[::2].tolist()
    assert (logprobs[::2] == 0).all() and (logprobs[1::2] < 0).all()
    assert (tokens[1::2] != logits.argmax(-1)[1::2].numpy()).any()


def test_the_nucleus_always_holds_the_best_token() -> None:
    tokens, logprobs, _ = draw(torch.tensor([[0.0, 5.0, 1.0]]), rows(1, top_p=1e-6))
    assert (tokens[0], logprobs[0]) == (1, 0.0)


def test_the_penalty_counts_a_row_s_own_context_only() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [2.0, 1.5, -1.0]])
    state = rows(2, repetition_penalty=2.0, is_greedy=True)
    state["length"] = [2, 1]
    tokens, _, _ = sample(logits.clone(), state, np.array([[0, 0, 1], [2, 1, 1]]), np.array([0, 1]))
    assert tokens.tolist() == [1, 0]


def test_the_same_numbers_draw_the_same_tokens_by_kernels_and_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(500, 341, generator=torch.Generator().manual_seed(0)) * 4
    state = rows(500)
    state["is_greedy"][::7] = True
    state["top_k"][::3] = 20
    ours, our_logprobs, _ = draw(logits, state)
    monkeypatch.setattr(sampler, "load_kernels", lambda: None)
    tokens, logprobs, _ = draw(logits, state)
    # A number that lies between two tokens to the last bit may fall to either.
    is_same = ours == tokens
    assert (~is_same).sum() <= 1
    np.testing.assert_allclose(our_logprobs[is_same], logprobs[is_same], atol=2e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_logits_that_are_not_finite_are_refused(bad: float, is_greedy: bool) -> None:
    logits = torch.zeros(20, 21)
    logits[3, 20] = bad
    with pytest.raises(FloatingPointError, match="aren't finite"):
        draw(logits, rows(20, is_greedy=is_greedy))
    with pytest.raises(FloatingPointError, match="aren't finite"):
        draw(torch.full((1, 9), -torch.inf), rows(1, is_greedy=is_greedy))


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"do_sample": False, "temperature": 0.5}, True),
        ({"temperature": 0.5}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 3}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"do_sample": False, "repetition_penalty": 1.1}, False),
    ],
)
def test_only_the_models_own_distribution_is_left_as_it_is(changes: dict[str, Any], is_plain: bool) -> None:
    rows = Rows()
    rows.reserve(1, 8)
    rows.load(0, Request("a", np.array([1, 2]), SamplingParams(4, **changes)), 0, max_length=8)
    assert rows.state["is_plain"][0] == is_plain


def test_the_ids_that_a_token_was_drawn_from_come_back_with_it() -> None:
    logits = torch.randn(60, 50, generator=torch.Generator().manual_seed(3))
    state = rows(60, keeps_ids=True, top_k=20)
    state["top_p"][20:] = 0.8
    state["min_p"][40:] = 0.2
    state["keeps_ids"][::10] = False
    drawn = draw(logits, state)
    assert sorted(drawn.kept_ids) == [row for row in range(60) if row % 10]
    for row, kept_ids in drawn.kept_ids.items():
        probs = torch.softmax(logits[row].double(), -1).numpy()
        order = np.argsort(-probs)[:20]
        before = np.cumsum(probs[order]) - probs[order]
        if row >= 20:
            order = order[before / probs[order].sum() < 0.8]
        if row >= 40:
            order = order[probs[order] >= 0.2 * probs.max()]
        assert kept_ids.dtype == np.int32 and sorted(kept_ids.tolist()) == sorted(order.tolist())
        assert np.isclose(
            drawn.logprobs[row], np.log(probs[drawn.token_ids[row]] / probs[order].sum()), atol=1e-5
        )


def test_min_p_alone_cuts_without_saying_what_is_left() -> None:
    drawn = draw(torch.tensor([[2.0, 1.9, -3.0]]).repeat(500, 1), rows(500, min_p=0.5))
    assert set(drawn.token_ids.tolist()) == {0, 1} and drawn.kept_ids == {}
