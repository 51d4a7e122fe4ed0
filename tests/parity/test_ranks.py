"""Two ranks make the steps of one: the same samples, dealt to two processes, against all of them in one."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from rank_workers import InfiniteOnce, Kind, RaisesOnce, distance
from ranked_roles import STEPS, ask, moved, steps
from strategy_contract import VALUES, WeightedLoss
from toy_model import toy_samples

from turnwise.cluster import process_cluster
from turnwise.errors import WorkerError
from turnwise.pipelines.model_role import ModelRole

FULL, LORA, CRITIC = Kind(), Kind(rank=4), Kind("value", outputs=VALUES)


@pytest.mark.parametrize("kind", [FULL, LORA, CRITIC], ids=["full", "lora", "critic"])
def test_two_ranks_make_the_steps_of_one(make_role, kind):
    """The bounds of the project: log-probs 1e-6 in the mean, gradients 1e-5, displacement after three steps
    1e-3."""
    loss = WeightedLoss(outputs=kind.outputs)
    one, two = make_role(kind, 1), make_role(kind, 2)
    starts = [ask(role, "parameters") for role in (one, two)]
    np.testing.assert_equal(starts[0], starts[1])
    samples = toy_samples(11)
    for output in sorted(kind.outputs):
        alone, shared = (role.forward(samples, output) for role in (one, two))
        differences = np.concatenate([abs(a - b) for a, b in zip(alone, shared, strict=True)])
        assert differences.mean() <= 1e-6 and differences.max() <= 1e-4
    first = [steps(role, loss, 1)[0] for role in (one, two)]
    assert distance(*(ask(role, "last_gradient") for role in (one, two))) <= 1e-5
    assert first[0].keys() == first[1].keys()
    for name in (
        "actor/loss",
        "actor_train/grad_norm",
        "actor/lr",
        "actor/skipped_steps",
        "actor/backward_steps",
    ):
        np.testing.assert_allclose(first[1][name], first[0][name], rtol=1e-5)
    for role in (one, two):
        steps(role, loss, STEPS - 1)
        assert ask(role, "info").num_updates == role.num_updates == STEPS, (
            "by this a run knows whether its weights are whole"
        )
    assert distance(*(moved(role, start) for role, start in zip((one, two), starts, strict=True))) <= 1e-3


def of_each_rank(role: ModelRole, method: str = "parameters") -> list[Any]:
    return [role.workers.at(rank).call(method).result() for rank in range(role.workers.size)]


def test_ranks_have_the_same_weights_before_and_after_steps(make_role):
    """Whatever each rank has made, all begin with what the first one has."""
    role = make_role(Kind(differs=True), 2)
    np.testing.assert_equal(*of_each_rank(role))
    steps(role, WeightedLoss())
    np.testing.assert_equal(*of_each_rank(role))


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_of_all(make_role):
    role = make_role(FULL, 2)
    start = of_each_rank(role)
    metrics = role.optimizer_step(
        toy_samples(8), InfiniteOnce(role.workers._processes[1].process.life.process_id), position=0
    )
    assert [metric.value for metric in metrics if metric.name == "actor/skipped_steps"] == [1.0]
    np.testing.assert_equal(of_each_rank(role), start)


def test_fp16_scales_the_loss_alike_on_all_ranks(make_role):
    """An overflow on one rank halves the factor of both, and without one two ranks make the steps of one."""
    kind = Kind(dtype=torch.float16)
    one, two = make_role(kind, 1), make_role(kind, 2)
    measured = [steps(role, WeightedLoss()) for role in (one, two)]
    for alone, shared in zip(*measured, strict=True):
        assert alone["actor/skipped_steps"] == shared["actor/skipped_steps"]
        assert alone["actor/loss"] == pytest.approx(shared["actor/loss"], rel=1e-3)
    assert distance(*(ask(role, "last_gradient") for role in (one, two))) <= 1e-2
    start, [scale, _] = of_each_rank(two), of_each_rank(two, "loss_scale")
    assert scale == ask(one, "loss_scale") > 1
    two.optimizer_step(
        toy_samples(8), InfiniteOnce(two.workers._processes[1].process.life.process_id), position=STEPS
    )
    assert of_each_rank(two, "loss_scale") == [scale / 2, scale / 2]
    np.testing.assert_equal(of_each_rank(two), start)


def test_roles_on_other_devices_sum_among_themselves(make_roles):
    """Three processes: the critic's two ranks are no whole world."""
    gradients = []
    for role in make_roles(FULL, {"actor_train": [0, 1], "critic": [1, 2]}):
        role.optimizer_step(toy_samples(8), WeightedLoss(), position=0)
        gradients.append(ask(role, "last_gradient"))
    assert distance(*gradients) <= 1e-6


def test_a_role_outside_the_first_process_saves_its_weights(make_roles, tmp_path):
    roles = make_roles(Kind(), {"actor_train": [0], "critic": [1]})
    for role in roles:
        role.workers.call("save", tmp_path / role.name).result()
        role.workers.call("load", tmp_path / role.name).result()


def test_what_two_ranks_saved_goes_on_with_two_and_with_one(make_role, tmp_path):
    whole, loss = make_role(FULL, 2), WeightedLoss()
    steps(whole, loss, 2)
    whole.workers.call("save", tmp_path).result()
    saved = ask(whole, "parameters")
    steps(whole, loss, 1)
    for num_ranks in (2, 1):
        role = make_role(FULL, num_ranks)
        role.workers.call("load", tmp_path).result()
        np.testing.assert_equal(of_each_rank(role), [saved] * num_ranks)
        steps(role, loss, 1)
        if num_ranks == 2:
            np.testing.assert_equal(ask(role, "parameters"), ask(whole, "parameters"))
        assert distance(moved(whole, saved), moved(role, saved)) <= 1e-3, "moments and all"


def test_ranks_may_have_nothing_to_do(make_role):
    """One sample for two ranks: the other passes over a batch that counts nothing."""
    one, two = make_role(FULL, 1), make_role(FULL, 2)
    for role in (one, two):
        role.optimizer_step(toy_samples(1), WeightedLoss(), position=0)
    assert distance(*(ask(role, "last_gradient") for role in (one, two))) <= 1e-5
    sample = toy_samples(1)
    np.testing.assert_allclose(one.forward(sample, "logprobs"), two.forward(sample, "logprobs"), atol=1e-6)


def test_a_killed_rank_is_named_as_the_first_cause(make_role):
    role = make_role(FULL, 2)
    os.kill(role.workers._processes[1].process.life.process_id, signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"train_step: the trainer's process of rank 1 has ended: .*SIGKILL"
    ):
        role.optimizer_step(toy_samples(8), WeightedLoss(), position=0)


def test_an_error_of_one_rank_is_raised_while_the_other_waits_for_it(make_role, monkeypatch):
    monkeypatch.setattr(process_cluster, "_OTHERS_S", 0.5)
    role = make_role(FULL, 2)
    process = role.workers._processes[1].process.life.process_id
    with pytest.raises(ArithmeticError, match="the loss of one rank"):
        role.optimizer_step(toy_samples(8), RaisesOnce(process), position=0)
