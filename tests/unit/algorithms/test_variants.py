"""Each `pg_variant` token by token: numbers worked out by hand, gradients, and what carries none."""

from __future__ import annotations

import inspect
import math
import pickle
import sys
import types

import pytest
import torch

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.ratios import Spans
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.variants import VARIANTS, PolicyInputs, find_variant
from turnwise.errors import ConfigError
from turnwise.spec import PG_VARIANTS
from turnwise.types import ModelOutputs

OLD = [-1.0, -0.5, -2.0, -0.3, -1.2, -0.7]
NEW = [-0.6, -0.9, -2.0, -0.2, -1.9, -0.1]
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
SEQUENCES = [0, 0, 0, 1, 1, 1]
MASK = [True] * 5 + [False]
"""Two sequences of three and two trained tokens. Ratios: 1.491825, 0.670320, 1 and 1.105171, 0.496585; of
sequences 1 and 0.740818."""
CHOSEN = [True, False, False, False, True, False]
WIDER = {"clip_low": 0.2, "clip_high": 0.28}

WORKED = [
    ("ppo", WIDER, [-1.28, -0.670320, -1.0, 1.105171, 0.8]),
    ("gspo", WIDER, [-1.0, -1.0, -1.0, 0.8, 0.8]),
    ("gspo", {}, [-1.0, -1.0, -1.0, 0.9997, 0.9997]),
    ("gmpo", WIDER, [-0.960789, -0.960789, -0.960789, 0.951229, 0.951229]),
    ("cispo", WIDER, [0.768, 0.72, 2.0, -0.221034, -1.52]),
    ("sapo", {}, [-2.482145, -1.673274, -2.0, 2.009826, 1.412750]),
    ("vanilla", {}, [0.6, 0.9, 2.0, -0.2, -1.9]),
    ("tis", {"cap": 1.2}, [0.72, 0.603288, 2.0, -0.221034, -0.943512]),
    ("topr", {}, [0.6, 0.9, 2.0, -0.2, -0.943512]),
    ("topr", {"weight_positive": 2.0, "weight_negative": 0.5}, [1.2, 1.8, 4.0, -0.1, -0.471756]),
    ("kimi15", {}, [0.608, 0.908, 2.0, -0.1995, -1.8755]),
    ("clip_cov", WIDER, [0.0, -0.670320, -1.0, 1.105171, 0.0]),
    ("kl_cov", {"coef": 0.5}, [-1.291825, -0.670320, -1.0, 1.105171, 0.846585]),
]


def inputs(logprobs=NEW, old=OLD, advantages=ADVANTAGES, granularity="token", dtype=torch.float64):
    count = len(logprobs)
    sequences = torch.tensor((SEQUENCES * count)[:count])
    return PolicyInputs(
        logprobs=torch.as_tensor(logprobs, dtype=dtype),
        old_logprobs=torch.as_tensor(old, dtype=dtype),
        advantages=torch.as_tensor(advantages, dtype=dtype),
        spans=Spans(torch.tensor((MASK * count)[:count]), sequences, sequences),
        granularity=granularity,
        selected_mask=torch.tensor((CHOSEN * count)[:count]),
    )


def compute(name, given, **changes):
    return VARIANTS[name](given, **{**PG_VARIANTS[name].parameters, **changes})


def of(name):
    return (*PG_VARIANTS[name].granularities, "token")[0]


@pytest.mark.parametrize(("name", "changes", "expected"), WORKED)
def test_worked_numbers(name, changes, expected):
    losses, _ = compute(name, inputs(granularity=of(name)), **changes)
    assert losses[:5].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("granularity", ["segment", "geometric"])
@pytest.mark.parametrize("name", ["gspo", "gmpo", "ppo"])
def test_spans_of_64k_tokens_have_the_gradient_of_float64(name, granularity):
    generator = torch.Generator().manual_seed(0)
    count = 65536
    old = -torch.rand(count, generator=generator, dtype=torch.float64).to(torch.float32).double()
    moved = old + 0.01 * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.rand(count, generator=generator, dtype=torch.float64)
    found = {}
    for dtype in (torch.float32, torch.float64):
        logprobs = moved.to(torch.float32).to(dtype).requires_grad_()
        spans = Spans(
            torch.ones(count, dtype=torch.bool),
            torch.zeros(count, dtype=torch.int64),
            torch.zeros(count).long(),
        )
        given = PolicyInputs(
            logprobs, old.to(dtype), advantages.to(torch.float32).to(dtype), spans, granularity
        )
        losses, _ = compute(name, given, clip_low=0.4, clip_high=0.4)
        (losses.sum() / count).backward()
        found[dtype] = logprobs.grad.double() * count
    torch.testing.assert_close(found[torch.float32], found[torch.float64], rtol=1e-5, atol=1e-6)


def test_every_variant_has_worked_numbers_and_the_parameters_of_the_spec():
    assert {name for name, *_ in WORKED} == set(VARIANTS) == set(PG_VARIANTS)
    for name, function in VARIANTS.items():
        keywords = [
            p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        assert keywords == list(PG_VARIANTS[name].parameters)


@pytest.mark.parametrize("name", VARIANTS)
def test_everything_is_finite_however_far_the_policies_are_apart(name):
    for near, far in ((0.0, -1e6), (-1e6, 0.0)):
        logprobs = torch.full((6,), near, dtype=torch.float32, requires_grad=True)
        losses, _ = compute(name, inputs(logprobs, [far] * 6, granularity=of(name), dtype=torch.float32))
        losses.sum().backward()
        assert torch.isfinite(losses).all() and torch.isfinite(logprobs.grad).all()


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    far = inputs([3.0, 3.0], [-3.0, -3.0], [-1.0, 1.0])
    bounded, shares = compute("ppo", far)
    assert bounded.tolist() == pytest.approx([3.0, -1.2])
    assert shares["actor/dual_clipfrac"].tolist() == [True, False]
    unbounded, shares = compute("ppo", far, dual_clip=None)
    assert unbounded[0].item() == pytest.approx(math.exp(6.0))
    assert "actor/dual_clipfrac" not in shares


def test_the_shares_that_clips_hold():
    """Ratios 1.49, 0.67, 1 with A = 1 and 1.11, 0.50 with A = −1; a clip holds where it makes the loss
    larger."""
    _, shares = compute("ppo", inputs(), **WIDER)
    assert shares["actor/clipfrac"][:5].tolist() == [True, False, False, False, True]
    assert shares["actor/ppo_ratio_high_clipfrac"][:5].tolist() == [True, False, False, False, False]
    assert shares["actor/ppo_ratio_low_clipfrac"][:5].tolist() == [False, True, False, False, True]
    _, shares = compute("gmpo", inputs(granularity="geometric"), **WIDER)
    assert shares["actor/clipfrac"][:5].tolist() == [True, False, False, False, True]
    _, shares = compute("cispo", inputs(), **WIDER)
    assert shares["actor/clipfrac"][:5].tolist() == [True, True, False, False, True]
    assert compute("tis", inputs(), cap=1.2)[1]["actor/clipfrac"][:5].tolist() == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert compute("topr", inputs())[1]["actor/clipfrac"][:5].tolist() == [False, False, False, True, False]


# A user's own


def of_a_user(inputs, *, bonus, scale=1.0):
    """−scale·r·A − bonus"""
    return -scale * inputs.ratio * inputs.advantages - bonus, {
        "actor/bonus": torch.full_like(inputs.ratio, bonus)
    }


@pytest.fixture
def user_module(monkeypatch):
    module = types.ModuleType("a_users_losses")
    of_a_user.__module__ = module.__name__
    module.of_a_user = of_a_user
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_a_user_s_own_is_loaded_called_with_its_pg_args_and_sent_to_ranks(user_module, make_batch):
    settings = AlgorithmSettings(
        pg_variant=f"{user_module}:of_a_user", pg_args={"bonus": 0.5}, ratio_type="segment"
    )
    batch = make_batch([[0, 1, 1]], advantages=[0.0, 1.0, 1.0], old_logprobs=[0.0, -1.0, -1.0])
    outputs = ModelOutputs(logprobs=torch.tensor([0.0, -0.9, -0.9]))
    for loss in (PolicyLoss(settings), pickle.loads(pickle.dumps(PolicyLoss(settings)))):
        value, metrics = loss(outputs, batch)
        assert value.item() == pytest.approx(-math.exp(0.1) - 0.5)
        assert {m.name: float(m.value) for m in metrics}["actor/bonus"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("a_users_losses:of_a_user", {}, "missing a required argument: 'bonus'"),
        ("a_users_losses:of_a_user", {"bonus": 1.0, "bonas": 1.0}, "unexpected keyword argument 'bonas'"),
        ("a_users_losses:of_a_usr", {}, "no function 'of_a_usr'.*Did you mean 'of_a_user'"),
        ("a_users_losses:", {}, "must be 'module:function'"),
        ("a_users_loss:of_a_user", {}, "no module 'a_users_loss'"),
    ],
)
def test_a_user_s_own_that_can_t_be_called_is_refused_before_training(user_module, name, parameters, message):
    with pytest.raises(ConfigError, match=message):
        find_variant(name, parameters)
