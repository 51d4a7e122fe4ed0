"""Mistakes of published frameworks that concern log-probs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_model import toy_batches, toy_model, toy_samples

from turnwise.cluster.local import LocalCluster
from turnwise.models.forward import make_forward
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import VersionRun


@pytest.mark.parametrize(
    ("plan", "is_stale", "is_computed"),
    [
        ({"samples_per_step": 4}, False, False),
        ({"samples_per_step": 4}, True, True),
        ({"samples_per_step": 1}, False, True),
        ({"samples_per_step": 2, "num_epochs": 2}, False, True),
    ],
)
def test_only_fresh_samples_of_the_first_optimiser_step_have_a_ratio_of_one(plan, is_stale, is_computed):
    """For others, old is computed before the step: it isn't the step's own forward pass."""
    workers = LocalCluster().spawn("actor_train", lambda _: TorchStrategy(toy_model()))
    samples = toy_samples(2)
    if is_stale:
        samples[1].versions = ((VersionRun(0, 2), VersionRun(-1, 1)), samples[1].versions[1])
    ModelRole("actor_train", workers, BatchPlan(max_length=64, seed=0, **plan)).compute_old_log_probs(
        samples, version=0
    )
    assert [sample.old_logprobs is not None for sample in samples] == [is_computed] * 2


def test_the_trainer_s_log_probs_are_at_its_temperature():
    """A trainer that ignores the temperature measures a drift that isn't there, and its ratios are of another
    policy."""
    batch, wanted = toy_batches(toy_samples(4))[0], frozenset({"logprobs"})
    cold, plain = (
        TorchStrategy(toy_model(), temperature=t).forward([batch], wanted)[0]["logprobs"] for t in (0.5, 1.0)
    )
    logprobs = make_forward(toy_model())(batch.map(torch.as_tensor), wanted).logprobs.detach().numpy()
    np.testing.assert_allclose(plain, logprobs, atol=1e-6)
    assert np.abs(cold - plain)[batch.response_mask].mean() > 0.1
