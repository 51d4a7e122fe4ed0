"""Mistakes of published frameworks that concern losses, one test each."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_model import toy_batches, toy_model, toy_samples

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.cluster.local import LocalCluster
from turnwise.models.forward import make_forward
from turnwise.pipelines.roles import BatchPlan, ModelRole
from turnwise.spec import LOSS_AGG_MODES, PG_VARIANTS
from turnwise.tracking.metrics import reduce_metrics
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import ModelOutputs, VersionRun

NAN = float("nan")


def loss_of(batch, logprobs, **settings):
    return PolicyLoss(AlgorithmSettings(**settings))(ModelOutputs(logprobs=torch.tensor(logprobs)), batch)


def test_token_mean_does_not_forget_the_mask(make_batch):
    """Observation tokens have losses too; neither sum nor count may take them in."""
    batch = make_batch([[0, 1, 0, 1]], advantages=[100.0, 1.0, 100.0, 3.0])
    loss, _ = loss_of(batch, [-5.0, -1.0, -5.0, -1.0])
    assert loss.item() == pytest.approx(-(1.0 + 3.0) / 2)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_loss_is_not_scaled_by_the_number_of_micro_batches(mode, make_batch):
    """Each alone divided by its own count would weigh the token of the short sample three times."""
    rows, advantages = [[0, 1, 1, 1], [0, 1]], [0.0, 1.0, 1.0, 1.0, 0.0, 5.0]
    step = make_batch(rows, advantages=advantages)
    whole, _ = loss_of(step, [-1.0] * 6, loss_agg_mode=mode)
    parts = []
    for row, part in ((rows[0], advantages[:4]), (rows[1], advantages[4:])):
        batch = replace(make_batch([row], advantages=part), denominators=step.denominators)
        parts.append(loss_of(batch, [-1.0] * len(row), loss_agg_mode=mode)[0])
    assert sum(parts).item() == pytest.approx(whole.item())


def test_a_stale_sample_never_has_a_ratio_of_one():
    """One optimiser step on samples of an older version: old is the trainer's, computed before it, not its own forward pass."""
    strategy = TorchStrategy(toy_model())
    workers = LocalCluster().spawn("actor_train", lambda _: strategy)
    role = ModelRole("actor_train", workers, BatchPlan(samples_per_step=4, max_length=64, seed=0))
    samples = toy_samples(2)
    role.compute_old_log_probs(samples, version=0)
    assert all(sample.old_logprobs is None for sample in samples)  # fresh, and one step: the ratio is 1
    samples[1].versions = ((VersionRun(0, 2), VersionRun(-1, 1)), samples[1].versions[1])
    role.compute_old_log_probs(samples, version=0)
    assert all(sample.old_logprobs is not None for sample in samples)


def test_a_second_optimiser_step_never_has_a_ratio_of_one():
    """What it trains on was sampled before the first one."""
    strategy = TorchStrategy(toy_model())
    workers = LocalCluster().spawn("actor_train", lambda _: strategy)
    for plan in ({"samples_per_step": 1}, {"samples_per_step": 2, "num_epochs": 2}):
        role = ModelRole("actor_train", workers, BatchPlan(max_length=64, seed=0, **plan))
        samples = toy_samples(2)
        role.compute_old_log_probs(samples, version=0)
        assert all(sample.old_logprobs is not None for sample in samples)


def test_no_kl_is_measured_from_zeros(make_batch):
    """Without a reference there is no KL to it, and without the sampler's log-probs no mismatch."""
    _, metrics = loss_of(make_batch([[0, 1]], advantages=[0.0, 1.0]), [-1.0, -1.0])
    assert not [m.name for m in metrics if "kl_loss" in m.name or "train_infer" in m.name]


@pytest.mark.parametrize("variant", PG_VARIANTS)
def test_no_gradient_is_nan_behind_a_where(variant, make_batch):
    """exp overflows at the masked token; torch.where would hide that from the value and not from the gradient."""
    batch = make_batch([[0, 1]], advantages=[-1.0, -1.0], old_logprobs=[-1e30, -1.0], ref_logprobs=[1e30, -1.0])
    batch.selected_mask = torch.tensor([True, True])
    logprobs = torch.tensor([1e30, -0.5], requires_grad=True)
    settings = AlgorithmSettings(pg_variant=variant, use_kl_loss=True)
    loss, _ = PolicyLoss(settings)(ModelOutputs(logprobs=logprobs), batch)
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(logprobs.grad).all() and logprobs.grad[0] == 0


def test_trainer_and_sampler_have_one_temperature():
    """A trainer that ignores the temperature measures a drift that isn't there, and its ratios are of another policy."""
    samples = toy_samples(4)
    batch = toy_batches(samples)[0]
    logprobs = {}
    for temperature in (0.5, 1.0):
        [outputs] = TorchStrategy(toy_model(), temperature=temperature).forward([batch], frozenset({"logprobs"}))
        logprobs[temperature] = outputs["logprobs"]
    logits = make_forward(toy_model())(batch.map(torch.as_tensor), frozenset({"logprobs"})).logprobs.detach().numpy()
    np.testing.assert_allclose(logprobs[1.0], logits, atol=1e-6)
    assert np.abs(logprobs[0.5] - logprobs[1.0])[batch.response_mask].mean() > 0.1
    for sample, sampled in zip(samples, np.split(logprobs[0.5], np.cumsum(batch.lengths)[:-1]), strict=True):
        sample.rollout_logprobs, sample.old_logprobs = sampled, sampled.copy()
        sample.advantages = np.ones_like(sampled)
    step = pack(samples, denominators(samples, 64)).map(torch.as_tensor)
    _, metrics = PolicyLoss(AlgorithmSettings())(ModelOutputs(logprobs=torch.tensor(logprobs[0.5])), step)
    reduced = reduce_metrics(metrics)
    assert reduced["actor/train_infer_diff_token_max"] == 0.0 and reduced["actor/ratio_max"] == 1.0


def test_a_sequence_s_ratio_is_of_its_response_tokens_alone(make_batch):
    """GSPO's mean over the padded length would pull every ratio to 1."""
    batch = make_batch([[0, 0, 0, 0, 0, 0, 1, 1]], advantages=[1.0] * 8, old_logprobs=[0.0] * 6 + [-1.0, -1.0])
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    loss, _ = loss_of(batch, [0.0] * 6 + [-0.5, -0.7], pg_variant="gspo", pg_args=wide)
    assert loss.item() == pytest.approx(-math.exp(0.4))
