"""A whole update through the role, two optimiser steps of every loss and correction: the weights don't depend on the cut into
micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy_model import toy_model, toy_samples

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight, RatioBand
from turnwise.cluster.local import LocalCluster
from turnwise.pipelines.roles import BatchPlan, ModelRole
from turnwise.spec import PG_VARIANTS
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample

CORRECTION = Correction(ImportanceWeight("segment", 1.5), (RatioBand("token", 0.6, 1.7), RatioBand("geometric", 0.5, 1.6)))


def role(**plan: Any) -> ModelRole:
    strategy = TorchStrategy(toy_model(), optimizer=OptimizerSettings(learning_rate=1e-2), max_grad_norm=None)
    settings = BatchPlan(samples_per_step=5, max_length=64, seed=3, num_epochs=1, **plan)
    return ModelRole("actor_train", LocalCluster().spawn("actor_train", lambda _: strategy), settings)


def drifted_samples(actor: ModelRole) -> list[Sample]:
    """Ten samples whose sampler was about as far away as a stale one, with advantages."""
    samples = toy_samples(10)
    actor.compute_log_probs(samples, into="old_logprobs")
    rng = np.random.default_rng(0)
    for sample in samples:
        noise = rng.normal(scale=0.5, size=sample.num_tokens).astype(np.float32)
        sample.rollout_logprobs = np.where(sample.response_mask, sample.old_logprobs + noise, np.float32(0))
        sample.advantages = np.where(sample.response_mask, rng.normal(), 0).astype(np.float32)
    return samples


def update(loss: PolicyLoss, **plan: Any) -> tuple[torch.Tensor, list[float]]:
    """All weights after one update, and the share of tokens that was masked in each step."""
    actor = role(**plan)
    metrics = actor.train_step(drifted_samples(actor), loss, step=0)
    weights = torch.cat([weight.flatten().clone() for _, weight in actor.workers.call("weights").result()])
    return weights, [float(m.value) for m in metrics if m.name == "actor/train_infer_masked_frac"]


@pytest.mark.parametrize("variant", PG_VARIANTS)
def test_an_update_does_not_depend_on_the_cut_into_micro_batches(variant: str) -> None:
    arguments = {"pg_args": {"fraction": 0.1}} if variant.endswith("_cov") else {}
    loss = PolicyLoss(AlgorithmSettings(pg_variant=variant, train_infer_correction=CORRECTION, **arguments))
    whole, masked = update(loss, max_sequences=10)
    assert len(masked) == 2 and all(0.1 < share < 0.9 for share in masked)
    before = torch.cat([parameter.detach().flatten() for parameter in toy_model().parameters()])
    assert (whole - before).abs().max() > 5e-3
    for plan in ({"max_sequences": 1}, {"max_tokens_train": 70}):
        weights, same_masked = update(loss, **plan)
        difference = (weights - whole).abs()
        # Adam's first step is the sign of a gradient: a rounding decides it where there is none.
        assert difference.mean() <= 1e-6 and (difference > 1e-4).float().mean() < 1e-3
        assert same_masked == pytest.approx(masked)
