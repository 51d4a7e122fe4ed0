"""A role plans, packs and writes back; its workers here only record what they are given."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from turnwise.cluster.local import LocalCluster
from turnwise.errors import DeadlineError
from turnwise.pipelines.roles import BatchPlan, ModelRole
from turnwise.types import Metric, Sample, TurnSpan
from turnwise.watchdog import Watchdog


class Recorder:
    def __init__(self):
        self.steps = []
        self.positions = []

    def train_step(self, batches, loss, position):
        self.steps.append(batches)
        self.positions.append(position)
        return [Metric("grad_norm", 1.0), Metric("lr", 0.1, "last"), Metric("actor/pg_loss", 2.0)]

    def forward(self, batches, outputs):
        return [{"logprobs": -batch.token_ids.astype(np.float32)} for batch in batches]


def samples(num):
    return [
        Sample(
            token_ids=np.arange(i, i + 4 + i),
            response_mask=np.array([False] * 2 + [True] * (2 + i)),
            rollout_logprobs=np.zeros(4 + i, np.float32),
            turn_spans=(TurnSpan(0, 2, 4 + i),),
        )
        for i in range(num)
    ]


def role(prepare=None, **plan):
    workers = LocalCluster().spawn("actor_train", Recorder)
    settings = BatchPlan(**({"samples_per_step": 4, "max_length": 64, "seed": 0, "max_sequences": 2} | plan))
    return ModelRole("actor_train", workers, settings, Watchdog(), prepare)


def test_forward_results_go_back_to_their_samples_in_order():
    chosen = samples(5)
    role(max_tokens_infer=9).compute_log_probs(chosen, into="ref_logprobs")
    for sample in chosen:
        np.testing.assert_array_equal(sample.ref_logprobs, -sample.token_ids)
        assert sample.old_logprobs is None


def test_every_sample_is_trained_on_once_an_epoch_with_the_denominators_of_its_step():
    actor = role(num_epochs=2)
    metrics = actor.train_step(samples(6), loss=None, step=0)
    steps = actor.workers.worker.steps
    assert [sum(len(b.lengths) for b in step) for step in steps] == [4, 2, 4, 2]
    for step in steps:
        assert all(b.denominators.num_tokens == sum(int(x.response_mask.sum()) for x in step) for b in step)
    assert {m.name for m in metrics} == {"actor_train/grad_norm", "actor/lr", "actor/pg_loss", "actor/backward_steps"}


def test_samples_that_begin_alike_share_a_micro_batch():
    plan = BatchPlan(samples_per_step=4, max_length=64, seed=0, max_sequences=2)
    chosen = samples(4)
    for sample, first in zip(chosen, (7, 3, 7, 3), strict=True):
        sample.token_ids[0] = first
    assert sorted(plan.cut(chosen, None)) == sorted(plan.cut(chosen, 12)) == [[0, 2], [1, 3]]


def test_prepare_is_shown_the_whole_optimiser_step_before_its_micro_batches():
    seen = []
    actor = role(prepare=lambda batch: seen.append((len(batch.lengths), len(actor.workers.worker.steps))))
    actor.train_step(samples(6), loss=None, step=0)
    assert seen == [(4, 0), (2, 1)]


def test_a_step_without_trained_tokens_is_left_out_and_counted():
    [sample] = samples(1)
    sample.response_mask[:] = False
    actor = role()
    [metric] = actor.train_step([sample], loss=None, step=0)
    assert (metric.name, metric.value, actor.workers.worker.steps) == ("actor/backward_steps", 0.0, [])


@pytest.mark.parametrize("method", ["train_step", "forward"])
def test_a_trainer_that_never_returns_is_named(method):
    class Stuck(Recorder):
        def train_step(self, batches, loss, position):
            threading.Event().wait()

        def forward(self, batches, outputs):
            threading.Event().wait()

    with Watchdog(grace_s=10.0, poll_s=0.01) as watchdog:
        workers = LocalCluster().spawn("actor_train", Stuck)
        plan = BatchPlan(samples_per_step=4, max_length=64, seed=0, deadline_s=0.05)
        actor = ModelRole("actor_train", workers, plan, watchdog)
        with pytest.raises(DeadlineError) as caught:
            actor.train_step(samples(2), None, 0) if method == "train_step" else actor.forward(samples(2), "logprobs")
    first, *stacks = str(caught.value).splitlines()
    assert first == f"the pipeline waited 0.05 s for actor_train.{method}; raise deadlines.train_s if that may take longer"
    assert any(f"in {method}: threading.Event().wait()" in line for line in stacks)
