"""A step whose samples come in parts is the step on all of them: same weights, same metrics, up to the order
of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from strategy_contract import weights_of
from toy_model import toy_model, toy_samples

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight, RatioBand
from turnwise.cluster.local import LocalCluster
from turnwise.models.lora import Adapters, LoRASettings
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.pipelines.policy_update import PolicyUpdate
from turnwise.spec import LOSS_AGG_MODES, PG_VARIANTS, OldLogProbs
from turnwise.tracking.metrics import reduce_metrics
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample, VersionRun

NUM_SAMPLES = 12
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, total_steps=4)
CUT = [1, 4, 4, 11]
"""Where parts end; one of them is empty."""
CORRECTIONS = {
    "none": Correction(),
    "weights": Correction(ImportanceWeight("token", 1.2)),
    "both": Correction(
        ImportanceWeight("segment", 1.2), (RatioBand("token", 0.6, 1.6), RatioBand("geometric", 0.5, 3.0))
    ),
}


def credited_samples() -> list[Sample]:
    """Samples of versions 1 and 0, with advantages, a reference's log-probs, and a sampler's that are near
    the model's."""
    rng = np.random.default_rng(3)
    samples = toy_samples(NUM_SAMPLES, seed=1)
    for number, sample in enumerate(samples):
        sample.versions = tuple(
            (VersionRun(number % 2, span.stop - span.start),) for span in sample.turn_spans
        )
        sample.advantages = rng.normal(size=sample.num_tokens).astype(np.float32)
        noise = rng.normal(scale=0.5, size=sample.num_tokens)
        sample.rollout_logprobs = np.where(sample.response_mask, noise - 5.0, 0.0).astype(np.float32)
        sample.ref_logprobs = -rng.random(sample.num_tokens).astype(np.float32)
    return samples


def full_strategy() -> TorchStrategy:
    return TorchStrategy(toy_model(), optimizer=OPTIMIZER)


def adapted_strategy() -> TorchStrategy:
    model = toy_model()
    return TorchStrategy(model, adapters=Adapters(model, LoRASettings(rank=4, alpha=8)), optimizer=OPTIMIZER)


def trained(
    cut: Sequence[int],
    settings: AlgorithmSettings,
    is_stale: bool = True,
    make_strategy: Callable[[], TorchStrategy] = full_strategy,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights and the metrics after two steps on the samples, in parts that end at the places of the cut.
    With adapters the reference is the model without them."""
    workers = LocalCluster().spawn("actor_train", lambda _: make_strategy())
    plan = BatchPlan(
        samples_per_step=NUM_SAMPLES,
        max_length=64,
        seed=0,
        max_tokens_train=100,
        samples_per_batch=NUM_SAMPLES,
    )
    old_log_probs: OldLogProbs = "always" if "old_logprobs" in settings.needs else "if_needed"
    role = ModelRole("actor_train", workers, plan, old_log_probs=old_log_probs)
    loss, reduced = PolicyLoss(settings), dict[str, Any]()
    for step in (1, 2):
        samples = (
            credited_samples()
            if is_stale
            else [replace(sample, versions=()) for sample in credited_samples()]
        )
        update = PolicyUpdate(role, loss, step, is_streamed=bool(cut))
        metrics, bounds = [], [0, *cut, NUM_SAMPLES]
        for start, stop in pairwise(bounds):
            part = samples[start:stop]
            if workers.worker.info().adapters:
                role.without_adapter("reference", plan).compute_log_probs(part, into="ref_logprobs")
            role.compute_old_log_probs(part, version=1)
            metrics += update.train_on(part, is_last=stop == NUM_SAMPLES)
        reduced |= {
            f"{name} of step {step}": value
            for name, value in reduce_metrics(metrics).items()
            if "batch/" not in name
        }
    return weights_of(workers.worker), reduced


def assert_parts_are_the_whole(settings: AlgorithmSettings, **how: Any) -> dict[str, Any]:
    """Returns the metrics in parts."""
    (weights, metrics), (got_weights, got_metrics) = (trained(cut, settings, **how) for cut in ([], CUT))
    assert all(metrics[f"actor_train/grad_norm of step {step}"] > 0 for step in (1, 2))
    assert got_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(got_metrics[name], value, rtol=2e-4, atol=1e-6, err_msg=name)
    # Adam makes much of the order of sums where a gradient is nearly 0.
    difference = torch.cat([(got_weights[name] - tensor).abs().flatten() for name, tensor in weights.items()])
    assert difference.mean() <= 2e-6
    return got_metrics


@pytest.mark.parametrize(
    ("mode", "correction"),
    [*((mode, "both") for mode in LOSS_AGG_MODES), ("token-mean", "none"), ("token-mean", "weights")],
)
def test_whatever_the_aggregation_and_the_correction(mode, correction):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.05}
    assert_parts_are_the_whole(
        AlgorithmSettings(loss_agg_mode=mode, train_infer_correction=CORRECTIONS[correction], **kl)
    )


@pytest.mark.parametrize("variant", [name for name, spec in PG_VARIANTS.items() if not spec.chooses_tokens])
def test_whatever_the_variant(variant):
    assert_parts_are_the_whole(AlgorithmSettings(pg_variant=variant))


def test_fresh_samples_have_ratios_of_exactly_one():
    assert assert_parts_are_the_whole(AlgorithmSettings(), is_stale=False)["actor/ratio_max of step 2"] == 1.0


def test_adapters_keep_their_gradients_while_the_reference_runs_without_them():
    settings = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.5)
    metrics = assert_parts_are_the_whole(settings, make_strategy=adapted_strategy)
    assert metrics["actor/kl_loss of step 2"] > metrics["actor/kl_loss of step 1"] == 0


OTHER_TERMS = ({"entropy_loss_coef": 0.01}, {"use_kl_loss": True, "kl_loss_coef": 0.1}, {})


@pytest.mark.parametrize("variant", PG_VARIANTS)
@pytest.mark.parametrize("terms", OTHER_TERMS, ids=["entropy", "kl", "alone"])
def test_an_update_is_left_out_only_where_its_gradient_would_be_zero(variant, terms):
    samples = credited_samples()
    for sample in samples:
        sample.advantages = np.zeros(sample.num_tokens, np.float32)
        sample.old_logprobs = sample.rollout_logprobs
    workers = LocalCluster().spawn("actor_train", lambda _: full_strategy())
    plan = BatchPlan(
        samples_per_step=NUM_SAMPLES,
        max_length=64,
        seed=0,
        max_tokens_train=100,
        samples_per_batch=NUM_SAMPLES,
    )
    role, loss = (
        ModelRole("actor_train", workers, plan),
        PolicyLoss(AlgorithmSettings(pg_variant=variant, **terms)),
    )
    grad_norm = reduce_metrics(role.train_step(samples, loss, step=1))["actor_train/grad_norm"]
    assert loss.needs_advantages == (not terms and variant not in ("kimi15", "kl_cov")) == (grad_norm == 0)
