from __future__ import annotations

import math

import pytest
import torch

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.spec import LOSS_AGG_MODES
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import ModelOutputs

NAN = float("nan")


def random_batch(make_batch):
    generator = torch.Generator().manual_seed(0)
    masks = [[0, 1, 1, 0], [0, 1], [0, 0, 1, 1, 1], [0, 0]]
    n = sum(map(len, masks))
    arrays = {
        name: torch.randn(n, generator=generator) for name in ("old_logprobs", "ref_logprobs", "advantages")
    }
    return make_batch(masks, **arrays), torch.randn(n, generator=generator)


def stepped(batch, logprobs, settings, **outputs):
    """The loss, its gradient by the log-probs, and the reduced metrics."""
    leaf = torch.as_tensor(logprobs).clone().requires_grad_()
    loss, metrics = PolicyLoss(settings)(ModelOutputs(logprobs=leaf, **outputs), batch)
    loss.backward()
    return loss.item(), leaf.grad, reduce_metrics(metrics)


PLAIN = AlgorithmSettings()
FULL = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, entropy_loss_coef=0.05)


def test_a_variant_is_shown_zeros_outside_the_mask(make_batch):
    batch, lp = random_batch(make_batch)
    outside = ~batch.response_mask
    for array in (lp, batch.old_logprobs, batch.advantages):
        array[outside] = NAN
    seen = []
    loss = PolicyLoss(PLAIN)
    loss.compute, loss.parameters = lambda inputs: seen.append(inputs) or (inputs.logprobs, {}), {}
    loss(ModelOutputs(logprobs=lp), batch)
    for array in (seen[0].logprobs, seen[0].old_logprobs, seen[0].advantages):
        assert (array[outside] == 0).all() and (array[batch.response_mask] != 0).all()


def test_loss_metrics_are_means_over_optimiser_steps(make_batch):
    """Two steps of different sizes: `actor/pg_loss` is the plain mean of their losses."""
    policy_loss = PolicyLoss(AlgorithmSettings())
    losses, metrics = [], []
    for masks in ([[1, 1, 1]], [[1]]):
        batch = make_batch(masks, advantages=[float(len(masks[0]))] * len(masks[0]))
        loss, emitted = policy_loss(ModelOutputs(logprobs=torch.full((len(masks[0]),), -1.0)), batch)
        losses.append(loss.item())
        metrics += emitted
    assert reduce_metrics(metrics)["actor/pg_loss"] == pytest.approx(sum(losses) / 2)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient(make_batch):
    batch = make_batch([[0, 1, 1]], advantages=[9.0, 2.0, -1.0], rollout_logprobs=[0.0, -1.0, -2.5])
    _, gradient, reduced = stepped(batch, [-0.1, -1.0, -2.0], PLAIN)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.0, 0.5]))
    assert reduced["actor/ratio_max"] == reduced["actor/ratio_min"] == 1.0
    assert reduced["actor/train_infer_diff_token_max"] == pytest.approx(0.5)


def test_no_kl_is_measured_from_zeros(make_batch):
    """Without a reference there is no KL to it, and without the sampler's log-probs no mismatch."""
    _, _, reduced = stepped(make_batch([[0, 1]], advantages=[0.0, 1.0]), [-1.0, -1.0], PLAIN)
    assert not [name for name in reduced if "kl_loss" in name or "train_infer" in name]


def test_how_far_the_policy_has_moved_is_measured_from_old(make_batch):
    batch = make_batch([[0, 1, 1]], advantages=[0.0, 1.0, 1.0], old_logprobs=[NAN, -1.2, -2.5])
    _, _, reduced = stepped(batch, [NAN, -1.0, -2.0], PLAIN)
    assert reduced["actor/approxkl"] == pytest.approx((0.02 + 0.125) / 2)
    assert reduced["actor/policykl"] == pytest.approx(-(0.2 + 0.5) / 2)
    ratios = [math.exp(0.2), math.exp(0.5)]
    assert reduced["actor/ratio_mean"] == pytest.approx(sum(ratios) / 2)
    assert (reduced["actor/ratio_min"], reduced["actor/ratio_max"]) == (
        pytest.approx(ratios[0]),
        pytest.approx(ratios[1]),
    )


MISMATCH = {"diff_token_mean", "diff_token_max", "diff_token_p99", "ratio_token_mean", "kl", "ess"}


@pytest.mark.parametrize(
    ("settings", "old", "expected"),
    [
        ({}, None, [0.1, 0.5]),
        ({}, [NAN, -1.2, -2.0], [0.2, 0.5]),
        ({"use_rollout_log_probs": True}, [NAN, -1.0, -2.5], [0.1, 0.5]),
    ],
)
def test_the_mismatch_is_always_measured_from_the_trainer_s_own_log_probs(
    settings, old, expected, make_batch
):
    """They are old where it was computed, else those of the loss's own pass, also where old is the
    sampler's."""
    arrays = {} if old is None else {"old_logprobs": old}
    batch = make_batch([[0, 1, 1]], advantages=[9.0, 2.0, -1.0], rollout_logprobs=[NAN, -1.0, -2.5], **arrays)
    _, _, reduced = stepped(batch, [NAN, -1.1, -2.0], AlgorithmSettings(**settings))
    assert {name.removeprefix("actor/train_infer_") for name in reduced if "train_infer" in name} == MISMATCH
    assert reduced["actor/train_infer_diff_token_mean"] == pytest.approx(sum(expected) / 2)
    assert reduced["actor/train_infer_diff_token_max"] == pytest.approx(expected[1])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_entropy_is_logged_in_nats_a_token_whatever_the_aggregation(mode, make_batch):
    batch = make_batch([[0, 1, 1, 1], [0, 1]], weights=[1.0, 0.5], advantages=[0.0] * 6)
    entropy = torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0, 4.0])
    settings = AlgorithmSettings(loss_agg_mode=mode, entropy_loss_coef=0.1)
    _, _, reduced = stepped(batch, [-1.0] * 6, settings, entropy=entropy)
    assert reduced["actor/entropy"] == pytest.approx((1 + 2 + 3 + 0.5 * 4) / 3.5)


def test_parts_and_total(make_batch):
    batch, lp = random_batch(make_batch)
    loss, _, reduced = stepped(batch, lp, FULL, entropy=torch.full_like(lp, 0.7))
    expected = reduced["actor/pg_loss"] + 0.1 * reduced["actor/kl_loss"] - 0.05 * reduced["actor/entropy"]
    assert reduced["actor/total_loss"] == pytest.approx(expected, abs=1e-6)
    assert reduced["actor/total_loss"] == pytest.approx(loss, abs=1e-6)
    assert reduced["actor/entropy"] == pytest.approx(0.7)


def test_an_entropy_bonus_raises_entropy(make_batch):
    batch = make_batch([[1]], advantages=[0.0])
    logits = torch.tensor([2.0, 0.0, -1.0], requires_grad=True)
    logp = torch.log_softmax(logits, 0)
    entropy = -(logp.exp() * logp).sum().reshape(1)
    loss, _ = PolicyLoss(AlgorithmSettings(entropy_loss_coef=1.0))(
        ModelOutputs(logprobs=logp[:1], entropy=entropy), batch
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0] > 0  # descent lowers the likeliest logit
