from __future__ import annotations

import math
import pickle

import pytest
import torch

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.spec import LOSS_AGG_MODES
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import ModelOutputs

NAN = float("nan")


def random_batch(make_batch, seed=0, **extra):
    generator = torch.Generator().manual_seed(seed)
    masks = [[0, 1, 1, 0], [0, 1], [0, 0, 1, 1, 1], [0, 0]]
    n = sum(len(m) for m in masks)
    arrays = {name: torch.randn(n, generator=generator) for name in ("old_logprobs", "ref_logprobs", "advantages")}
    return masks, make_batch(masks, **arrays, **extra), torch.randn(n, generator=generator)


FULL = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, entropy_loss_coef=0.05)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nan_outside_the_mask_changes_neither_loss_nor_gradient_nor_metrics(mode, make_batch):
    settings = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, entropy_loss_coef=0.05, loss_agg_mode=mode)
    results = []
    for poison in (0.0, NAN, float("inf"), float("-inf")):
        _, batch, lp = random_batch(make_batch)
        outside = ~batch.response_mask
        lp = lp.clone()
        lp[outside] = poison
        for array in (batch.old_logprobs, batch.ref_logprobs, batch.advantages):
            array[outside] = poison
        entropy = torch.where(outside, poison, 0.7)
        lp.requires_grad_()
        loss, metrics = PolicyLoss(settings)(ModelOutputs(logprobs=lp, entropy=entropy), batch)
        loss.backward()
        results.append((loss.item(), lp.grad, reduce_metrics(metrics)))
        assert (lp.grad[outside] == 0).all()
    for loss, gradient, metrics in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])
        assert metrics == results[0][2]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_loss_gradient_and_metrics_do_not_depend_on_the_number_of_micro_batches(mode, make_batch):
    settings = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, entropy_loss_coef=0.05, loss_agg_mode=mode)
    policy_loss = PolicyLoss(settings)
    masks, step, lp = random_batch(make_batch)
    whole = lp.clone().requires_grad_()
    entropy = torch.linspace(0.1, 1.0, len(lp))
    loss, metrics = policy_loss(ModelOutputs(logprobs=whole, entropy=entropy), step)
    loss.backward()
    expected = reduce_metrics(metrics)

    parts = lp.clone().requires_grad_()
    total, part_metrics, start = 0.0, [], 0
    for mask in masks:
        here = slice(start, start + len(mask))
        arrays = {name: x[here] for name, x in vars_of(step).items()}
        batch = make_batch([mask], **arrays)
        batch.denominators = step.denominators
        part, emitted = policy_loss(ModelOutputs(logprobs=parts[here], entropy=entropy[here]), batch)
        part.backward()
        total += part.item()
        part_metrics += emitted
        start += len(mask)
    assert total == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad)
    assert reduce_metrics(part_metrics) == pytest.approx(expected, abs=1e-5)


def recording(seen):
    def variant(inputs):
        seen.append(inputs)
        return inputs.logprobs, {}

    return variant


def test_a_variant_is_shown_zeros_outside_the_mask(make_batch):
    _, batch, lp = random_batch(make_batch)
    outside = ~batch.response_mask
    for array in (lp, batch.old_logprobs, batch.advantages):
        array[outside] = NAN
    seen = []
    loss = PolicyLoss(AlgorithmSettings())
    loss.compute, loss.parameters = recording(seen), {}
    loss(ModelOutputs(logprobs=lp), batch)
    for array in (seen[0].logprobs, seen[0].old_logprobs, seen[0].advantages):
        assert (array[outside] == 0).all() and (array[batch.response_mask] != 0).all()


def vars_of(batch):
    return {name: getattr(batch, name) for name in ("old_logprobs", "ref_logprobs", "advantages")}


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
    lp = torch.tensor([-0.1, -1.0, -2.0], requires_grad=True)
    loss, metrics = PolicyLoss(AlgorithmSettings())(ModelOutputs(logprobs=lp), batch)
    loss.backward()
    torch.testing.assert_close(lp.grad, torch.tensor([0.0, -1.0, 0.5]))
    reduced = reduce_metrics(metrics)
    assert reduced["actor/ratio_max"] == reduced["actor/ratio_min"] == 1.0
    assert reduced["actor/train_infer_diff_token_max"] == pytest.approx(0.5)


def test_how_far_the_policy_has_moved_is_measured_from_old(make_batch):
    batch = make_batch([[0, 1, 1]], advantages=[0.0, 1.0, 1.0], old_logprobs=[NAN, -1.2, -2.5])
    _, metrics = PolicyLoss(AlgorithmSettings())(ModelOutputs(logprobs=torch.tensor([NAN, -1.0, -2.0])), batch)
    reduced = reduce_metrics(metrics)
    assert reduced["actor/approxkl"] == pytest.approx((0.02 + 0.125) / 2)
    assert reduced["actor/policykl"] == pytest.approx(-(0.2 + 0.5) / 2)
    ratios = [math.exp(0.2), math.exp(0.5)]
    assert reduced["actor/ratio_mean"] == pytest.approx(sum(ratios) / 2)
    assert (reduced["actor/ratio_min"], reduced["actor/ratio_max"]) == (pytest.approx(ratios[0]), pytest.approx(ratios[1]))


MISMATCH = {"diff_token_mean", "diff_token_max", "diff_token_p99", "ratio_token_mean", "kl", "ess"}


@pytest.mark.parametrize(
    ("settings", "old", "expected"),
    [
        ({}, None, [0.1, 0.5]),
        ({}, [NAN, -1.2, -2.0], [0.2, 0.5]),
        ({"use_rollout_log_probs": True}, [NAN, -1.0, -2.5], [0.1, 0.5]),
    ],
)
def test_the_mismatch_is_always_measured_from_the_trainer_s_own_log_probs(settings, old, expected, make_batch):
    """They are old where it was computed, else those of the loss's own pass, also where old is the sampler's."""
    arrays = {} if old is None else {"old_logprobs": old}
    batch = make_batch([[0, 1, 1]], advantages=[9.0, 2.0, -1.0], rollout_logprobs=[NAN, -1.0, -2.5], **arrays)
    lp = torch.tensor([NAN, -1.1, -2.0], requires_grad=True)
    _, metrics = PolicyLoss(AlgorithmSettings(**settings))(ModelOutputs(logprobs=lp), batch)
    reduced = reduce_metrics(metrics)
    assert {name.removeprefix("actor/train_infer_") for name in reduced if "train_infer" in name} == MISMATCH
    assert reduced["actor/train_infer_diff_token_mean"] == pytest.approx(sum(expected) / 2)
    assert reduced["actor/train_infer_diff_token_max"] == pytest.approx(expected[1])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_entropy_is_logged_in_nats_a_token_whatever_the_aggregation(mode, make_batch):
    batch = make_batch([[0, 1, 1, 1], [0, 1]], weights=[1.0, 0.5], advantages=[0.0] * 6)
    entropy = torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0, 4.0])
    policy_loss = PolicyLoss(AlgorithmSettings(loss_agg_mode=mode, entropy_loss_coef=0.1))
    _, metrics = policy_loss(ModelOutputs(logprobs=torch.full((6,), -1.0), entropy=entropy), batch)
    assert reduce_metrics(metrics)["actor/entropy"] == pytest.approx((1 + 2 + 3 + 0.5 * 4) / 3.5)


def test_parts_and_total(make_batch):
    _, batch, lp = random_batch(make_batch)
    loss, metrics = PolicyLoss(FULL)(ModelOutputs(logprobs=lp, entropy=torch.full_like(lp, 0.7)), batch)
    reduced = reduce_metrics(metrics)
    expected = reduced["actor/pg_loss"] + 0.1 * reduced["actor/kl_loss"] - 0.05 * reduced["actor/entropy"]
    assert reduced["actor/total_loss"] == pytest.approx(expected, abs=1e-6)
    assert reduced["actor/total_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert reduced["actor/entropy"] == pytest.approx(0.7)


def test_an_entropy_bonus_raises_entropy(make_batch):
    batch = make_batch([[1]], advantages=[0.0])
    logits = torch.tensor([2.0, 0.0, -1.0], requires_grad=True)
    logp = torch.log_softmax(logits, 0)
    entropy = -(logp.exp() * logp).sum().reshape(1)
    loss, _ = PolicyLoss(AlgorithmSettings(entropy_loss_coef=1.0))(ModelOutputs(logprobs=logp[:1], entropy=entropy), batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0] > 0  # descent lowers the likeliest logit


def test_a_micro_batch_without_trained_tokens_adds_nothing(make_batch):
    batch = make_batch([[0, 0]], advantages=[1.0, 1.0], old_logprobs=[0.0, 0.0])
    batch.denominators = batch.denominators._replace(num_tokens=5.0, num_sequences=2.0)
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = PolicyLoss(AlgorithmSettings())(ModelOutputs(logprobs=lp), batch)
    loss.backward()
    assert loss.item() == 0.0
    assert (lp.grad == 0).all()
    assert reduce_metrics(metrics) == {}


def test_padding_rows_of_weight_zero_have_no_gradient(make_batch):
    batch = make_batch([[1, 1], [1, 1]], weights=[1.0, 0.0], advantages=[1.0] * 4)
    lp = torch.full((4,), -1.0, requires_grad=True)
    loss, _ = PolicyLoss(AlgorithmSettings())(ModelOutputs(logprobs=lp), batch)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert lp.grad.tolist() == pytest.approx([-0.5, -0.5, 0.0, 0.0])


def test_it_can_be_sent_to_ranks():
    sent = pickle.loads(pickle.dumps(PolicyLoss(FULL)))
    assert sent.outputs == {"logprobs", "entropy"}


def test_pg_args_reach_the_function(make_batch):
    batch = make_batch([[1, 1]], advantages=[1.0, -1.0], old_logprobs=[-2.0, -2.0])
    outputs = ModelOutputs(logprobs=torch.tensor([0.0, 0.0]))
    for pg_args, expected in (({}, [-1.2, 3.0]), ({"clip_high": 0.5}, [-1.5, 3.0]), ({"dual_clip": 2.0}, [-1.2, 2.0])):
        loss, _ = PolicyLoss(AlgorithmSettings(pg_args=pg_args))(outputs, batch)
        assert loss.item() == pytest.approx(sum(expected) / 2)
