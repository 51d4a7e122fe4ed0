"""FSDP2 on two ranks makes the steps of plain torch on one: the same samples, dealt to two processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rank_workers import InfiniteOnce, Kind, distance, mean_distance
from ranked_roles import STEPS, in_two_parts, steps
from strategy_contract import VALUES, WeightedLoss
from toy_model import toy_samples

from turnwise.cluster.weight_senders import spawn_senders
from turnwise.pipelines.model_role import ModelRole

EPS = 1e-4
MOST_APART = 2e-6
"""A share of what the steps moved on average; 2e-7 to 6e-7 was measured, which is the rounding of fp32."""
"""Adam's ε. With the usual 1e-8 the first steps of parameters without a gradient follow the sign of rounding
errors."""
KINDS = {
    "tied": Kind(),
    "untied": Kind(config={"tie_word_embeddings": False}),
    "llama": Kind(config={"model_type": "llama"}),
    "value": Kind("value", outputs=VALUES),
    "lora": Kind(rank=4),
    "value_lora": Kind("value", rank=4, outputs=VALUES),
    "checkpointing": Kind(is_gradient_checkpointing=True),
    "clipped": Kind(max_grad_norm=0.1),
    "kept": Kind(fsdp2={"reshard_after_forward": False}),
    "freed": Kind(fsdp2={"reshard_after_forward": True}),
    "last": Kind(fsdp2={"sync_gradients": "last"}),
    "copies": Kind(fsdp2={"fsdp_size": 1}),
    "offloaded": Kind(fsdp2={"offload_policy": True}),
    "lora_checkpointing": Kind(rank=4, dropout=0.0, is_gradient_checkpointing=True),
    "fp32_by_name": Kind(fsdp2={"param_dtype": "fp32", "reduce_dtype": "float32"}),
}
KINDS["experts"] = Kind(
    config={
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
SMOKE = "tied"


def marked(name: str) -> Any:
    marks = [] if name == SMOKE else [pytest.mark.extra]
    return pytest.param(KINDS[name], id=name, marks=marks)


def pair(make_role, kind: Kind, num_ranks: int = 2) -> tuple[ModelRole, ModelRole]:
    """The kind in plain torch on one rank, and sharded."""
    one = replace(kind, fsdp2=None, eps=EPS)
    two = replace(kind, fsdp2=kind.fsdp2 or {}, eps=EPS)
    return make_role(one, 1), make_role(two, num_ranks)


def ask(role: ModelRole, method: str, *arguments: Any) -> Any:
    """What the first rank answers where all are asked."""
    return role.workers.call(method, *arguments, route="broadcast").result()


def moved(role: ModelRole, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value - start[name] for name, value in ask(role, "parameters").items()}


@pytest.mark.extra
@pytest.mark.parametrize("kind", [KINDS["tied"], KINDS["lora"]], ids=["full", "lora"])
def test_the_manifest_is_known_without_gathering(make_role, kind):
    one, two = pair(make_role, kind)
    senders = [spawn_senders(role.cluster, role.name, is_shared=True, is_sharded=True) for role in (one, two)]
    assert senders[0].manifest().result() == senders[1].manifest().result()
    alone, shared = (dict(role.sent_weights()) for role in (one, two))
    assert list(alone) == list(shared)
    assert all(torch.equal(alone[name], shared[name]) for name in alone)


@pytest.mark.extra
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_of_all(make_role):
    role = make_role(Kind(fsdp2={}), 2)
    start = ask(role, "parameters")
    process = role.workers._processes[1].process.life.process_id
    metrics = role.optimizer_step(toy_samples(8), InfiniteOnce(process), position=0)
    assert [metric.value for metric in metrics if metric.name == "actor/skipped_steps"] == [1.0]
    np.testing.assert_equal(ask(role, "parameters"), start)


@pytest.mark.extra
def test_fp16_scales_the_loss_alike_on_all_ranks(make_role):
    one, two = pair(make_role, Kind(dtype=torch.float16))
    measured = [steps(role, WeightedLoss()) for role in (one, two)]
    for alone, shared in zip(*measured, strict=True):
        assert alone["actor/skipped_steps"] == shared["actor/skipped_steps"]
        assert alone["actor/loss"] == pytest.approx(shared["actor/loss"], rel=1e-3)
    scale = ask(two, "loss_scale")
    assert scale == ask(one, "loss_scale") > 1
    process = two.workers._processes[1].process.life.process_id
    two.optimizer_step(toy_samples(8), InfiniteOnce(process), position=STEPS)
    assert [two.workers.at(rank).call("loss_scale").result() for rank in (0, 1)] == [scale / 2] * 2


@pytest.mark.extra
def test_roles_on_other_devices_sum_among_themselves(make_roles):
    """Three processes: neither role's two ranks are the whole world."""
    gradients = []
    for role in make_roles(Kind(fsdp2={}, eps=EPS), {"actor_train": [0, 1], "critic": [1, 2]}):
        role.optimizer_step(toy_samples(8), WeightedLoss(), position=0)
        gradients.append(ask(role, "last_gradient"))
    assert distance(*gradients) <= 1e-6


@pytest.mark.extra
def test_one_sample_for_two_ranks(make_role):
    """The other rank passes over a batch that counts nothing."""
    one, two = pair(make_role, Kind())
    for role in (one, two):
        role.optimizer_step(toy_samples(1), WeightedLoss(), position=0)
    assert distance(*(ask(role, "last_gradient") for role in (one, two))) <= 1e-5


@pytest.mark.extra
@pytest.mark.parametrize(
    "kind", [KINDS["tied"], KINDS["untied"], KINDS["value_lora"]], ids=["full", "untied", "value_lora"]
)
def test_a_checkpoint_goes_on_anywhere(make_role, tmp_path, kind):
    """Bit by bit on as many ranks; up to rounding in plain torch, which FSDP2 can go on from too."""
    loss = WeightedLoss(outputs=kind.outputs)
    _, two = pair(make_role, kind)
    steps(two, loss, 2)
    two.workers.call("save", tmp_path / "two").result()
    at_save = ask(two, "parameters")
    steps(two, loss, 1)
    expected = moved(two, at_save)
    again_one, again_two = pair(make_role, kind)
    for role in (again_one, again_two):
        role.workers.call("load", tmp_path / "two").result()
        np.testing.assert_equal(ask(role, "parameters"), at_save)
    again_one.workers.call("save", tmp_path / "one").result()
    steps(again_two, loss, 1)
    np.testing.assert_equal(moved(again_two, at_save), expected)
    two.workers.call("load", tmp_path / "one").result()
    for role in (two, again_one):
        steps(role, loss, 1)
        assert distance(expected, moved(role, at_save)) <= 1e-3


@pytest.mark.parametrize("kind", [marked(name) for name in KINDS])
def test_two_ranks_make_the_steps_of_plain_torch(make_role, kind):
    require_same_steps(pair(make_role, kind), WeightedLoss(outputs=kind.outputs))


@pytest.mark.extra
@pytest.mark.parametrize("kind", [KINDS["tied"], Kind(fsdp2={"fsdp_size": 2})], ids=["shards", "copies"])
def test_four_ranks_make_the_steps_of_plain_torch(make_role, kind):
    roles = pair(make_role, kind, 4)
    require_same_steps(roles, WeightedLoss(outputs=kind.outputs))


def require_same_steps(roles: tuple[ModelRole, ModelRole], loss: WeightedLoss) -> None:
    """Log-probs 1e-6 in the mean, gradients and their norm 1e-5, and what weights moved by in three steps and
    one in two parts 1e-6 in the mean. AdamW hides a gradient of a wrong scale, so gradients are compared."""
    starts = [ask(role, "parameters") for role in roles]
    np.testing.assert_equal(*starts)
    samples = toy_samples(11)
    for output in sorted(loss.outputs):
        alone, shared = (role.forward(samples, output) for role in roles)
        differences = np.concatenate([abs(a - b) for a, b in zip(alone, shared, strict=True)])
        assert differences.mean() <= 1e-6 and differences.max() <= 1e-4
    first = [steps(role, loss, 1)[0] for role in roles]
    assert distance(*(ask(role, "last_gradient") for role in roles)) <= 1e-5
    assert first[0].keys() == first[1].keys()
    for name in ("actor/loss", "actor_train/grad_norm", "actor/lr", "actor/skipped_steps"):
        np.testing.assert_allclose(first[1][name], first[0][name], rtol=1e-5)
    for role in roles:
        steps(role, loss, STEPS - 1)
    displaced = [moved(role, start) for role, start in zip(roles, starts, strict=True)]
    assert mean_distance(*displaced) <= MOST_APART
    for role in roles:
        in_two_parts(role, loss)
    gradients = [ask(role, "last_gradient") for role in roles]
    assert distance(*gradients) <= 1e-5
    assert all(gradient.any() for gradient in gradients[1].values())
    displaced = [moved(role, start) for role, start in zip(roles, starts, strict=True)]
    assert mean_distance(*displaced) <= MOST_APART
