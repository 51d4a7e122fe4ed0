"""A role plans, packs and writes back; its workers here only record what they are given."""

from __future__ import annotations

import numpy as np
import pytest
from messages import says

from turnwise.cluster.local import LocalCluster
from turnwise.errors import NotAvailableError
from turnwise.pipelines.log_prob_change import log_prob_change
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.pipelines.policy_update import PolicyUpdate
from turnwise.protocols import StepPart
from turnwise.runtime.stopwatch import Stopwatch, TokenCounts
from turnwise.types import Denominators, Metric, Sample, TokenAnnotations, TurnSpan


class Recorder:
    def __init__(self, rank):
        self.steps = []
        self.positions = []
        self.parts = []
        self.stopwatch = rank.stopwatch

    def train_step(self, batches, loss, position, part):
        self.steps.append(batches)
        self.positions.append(position)
        self.parts.append(part)
        self._count(batches)
        return [Metric("grad_norm", 1.0), Metric("lr", 0.1, "last"), Metric("actor/pg_loss", 2.0)]

    def _count(self, batches):
        """As if one distinct token of a sample were padded to four."""
        for batch in batches:
            self.stopwatch.did_tokens(
                TokenCounts(batch.num_tokens, len(batch.lengths), 4 * len(batch.lengths))
            )

    def forward(self, batches, outputs):
        self._count(batches)
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


def role(**plan):
    stopwatch = Stopwatch()
    workers = LocalCluster(stopwatch).spawn("actor_train", Recorder)
    settings = BatchPlan(**({"samples_per_step": 4, "max_length": 64, "seed": 0, "max_sequences": 2} | plan))
    return ModelRole("actor_train", workers, settings, stopwatch)


def test_forward_results_go_back_to_their_samples_in_order():
    chosen = samples(5)[::-1]
    role(max_tokens_infer=9).compute_log_probs(chosen, into="ref_logprobs")
    for sample in chosen:
        np.testing.assert_array_equal(sample.ref_logprobs, -sample.token_ids)
        assert sample.old_logprobs is None


def test_shares_of_padding_and_of_merged_prefixes_are_those_of_what_the_workers_computed():
    actor = role()
    of_forward = {m.name: m for m in actor.compute_log_probs(samples(3), into="old_logprobs")}
    of_step = {m.name: m for m in actor.train_step(samples(2), loss=None, step=0)}
    for kind, metrics, num_samples, num_tokens in (("forward", of_forward, 3, 15), ("train", of_step, 2, 9)):
        padding, merged = (metrics[f"batch/actor_train/{kind}/{what}"] for what in ("padding", "merged"))
        assert (padding.value, padding.weight) == (0.75, 4 * num_samples)
        assert (merged.value, merged.weight) == (1 - num_samples / num_tokens, num_tokens)


def test_every_sample_is_trained_on_once_an_epoch_with_the_denominators_of_its_step():
    actor = role(num_epochs=2)
    metrics = actor.train_step(samples(6), loss=None, step=0)
    steps = actor.workers.worker.steps
    assert [sum(len(b.lengths) for b in step) for step in steps] == [4, 2, 4, 2]
    for step in steps:
        assert all(b.denominators.num_tokens == sum(int(x.response_mask.sum()) for x in step) for b in step)
    assert {m.name for m in metrics} == {
        "actor_train/grad_norm",
        "actor/lr",
        "actor/pg_loss",
        "actor/backward_steps",
        "batch/actor_train/train/padding",
        "batch/actor_train/train/merged",
    }


def test_the_schedule_moves_with_the_pipeline_however_many_samples_a_step_has():
    actor = role(samples_per_batch=8, first_step=1)
    for step, num_samples in ((1, 8), (2, 12), (3, 2)):
        actor.train_step(samples(num_samples), loss=None, step=step)
    assert actor.workers.worker.positions == [0, 1, 2, 2 + 2 / 3, 2 + 4 / 3, 4]


def test_samples_that_begin_alike_share_a_micro_batch():
    plan = BatchPlan(samples_per_step=4, max_length=64, seed=0, max_sequences=2)
    chosen = samples(4)
    for sample, first in zip(chosen, (7, 3, 7, 3), strict=True):
        sample.token_ids[0] = first
    assert sorted(plan.cut(chosen, None)) == sorted(plan.cut(chosen, 12)) == [[0, 2], [1, 3]]


class PreparedLoss:
    """Keeps the odd tokens of a step, by their place in it, and notes what it is shown."""

    def __init__(self, actor):
        self.actor, self.seen, self.seeds = actor, [], []

    def prepare(self, step_batch, seed):
        self.seen.append((len(step_batch.lengths), len(self.actor.workers.worker.steps)))
        self.seeds.append(seed)
        place = np.arange(step_batch.num_tokens)
        annotations = TokenAnnotations(
            keep_mask=place % 2 == 1, importance=place.astype(np.float32), selected_mask=place < 5
        )
        return annotations, [Metric("actor/masked", 0.5)]


def test_what_a_loss_prepares_travels_with_its_tokens_and_is_counted_before_the_cut():
    actor = role(max_sequences=1)
    loss = PreparedLoss(actor)
    chosen = samples(6)
    metrics = actor.train_step(chosen, loss, step=0)
    assert loss.seen == [(4, 0), (2, 1)] and len(set(loss.seeds)) == 2
    assert [m.value for m in metrics if m.name == "actor/masked"] == [0.5, 0.5]
    for batches in actor.workers.worker.steps:
        kept = sum(int(batch.loss_mask.sum()) for batch in batches)
        assert all(batch.denominators.num_tokens == kept for batch in batches)
        places = np.concatenate([batch.importance for batch in batches])
        assert sorted(places) == list(range(len(places)))
        for batch in batches:
            np.testing.assert_array_equal(batch.keep_mask, batch.importance % 2 == 1)
            np.testing.assert_array_equal(batch.selected_mask, batch.importance < 5)
    assert all(sample.keep_mask is sample.importance is sample.selected_mask is None for sample in chosen)


def test_seeds_of_steps_repeat_with_the_run_s():
    seeds = []
    for step in (0, 0, 1):
        actor = role(num_epochs=2)
        loss = PreparedLoss(actor)
        actor.train_step(samples(6), loss, step)
        seeds.append(loss.seeds)
    assert seeds[0] == seeds[1] and len(set(seeds[0] + seeds[2])) == 8


def test_a_step_whose_tokens_are_all_taken_out_is_left_out_and_measured():
    class Nothing(PreparedLoss):
        def prepare(self, step_batch, seed):
            return TokenAnnotations(keep_mask=np.zeros(step_batch.num_tokens, bool)), [
                Metric("actor/masked", 1.0)
            ]

    actor = role()
    metrics = actor.train_step(samples(2), Nothing(actor), step=0)
    assert [(m.name, m.value) for m in metrics] == [("actor/masked", 1.0), ("actor/backward_steps", 0.0)]
    assert actor.workers.worker.steps == []


def test_a_step_without_trained_tokens_is_left_out_and_counted():
    [sample] = samples(1)
    sample.response_mask[:] = False
    actor = role()
    [metric] = actor.train_step([sample], loss=None, step=0)
    assert (metric.name, metric.value, actor.workers.worker.steps) == ("actor/backward_steps", 0.0, [])


class SummedLoss:
    """One whose step may come in parts, by the number of sequences."""

    def divisor(self, denominators):
        return denominators.num_sequences

    def whole(self, metrics, denominators):
        return [
            m._replace(value=m.value * denominators.num_tokens) if m.name == "actor/pg_loss" else m
            for m in metrics
        ]


class AdvantageLoss(SummedLoss):
    """One that may have nothing to say without advantages."""

    def __init__(self, needs_advantages=True):
        self.needs_advantages = needs_advantages


def credited(num, advantage):
    """Whose prompts have an advantage that isn't to be read."""
    chosen = samples(num)
    for sample in chosen:
        sample.advantages = np.where(sample.response_mask, advantage, 7.0).astype(np.float32)
    return chosen


def updating(loss=None, step=0, is_streamed=True, **plan):
    """An update of a role, and the role's worker."""
    actor = role(**plan)
    return PolicyUpdate(actor, loss or SummedLoss(), step, is_streamed), actor.workers.worker


def sizes(worker):
    """The number of samples of each part."""
    return [sum(len(batch.lengths) for batch in batches) for batches in worker.steps]


class TestUpdate:
    @pytest.mark.parametrize(
        ("is_streamed", "parts"), [(False, [StepPart(0, 1.0)] * 2), (True, [StepPart(0, 6.0)])]
    )
    def test_a_streamed_step_is_one_however_many_samples_come_and_in_how_many_parts(self, is_streamed, parts):
        update, worker = updating(is_streamed=is_streamed)
        metrics = update.train_on(samples(6), is_last=True)
        assert worker.parts == parts
        assert [m.value for m in metrics if m.name == "actor/backward_steps"] == [1.0] * len(parts)

    def test_a_streamed_step_that_came_at_once_and_fits_one_is_an_ordinary_one(self):
        update, worker = updating()
        update.train_on(samples(4), is_last=True)
        assert worker.parts == [StepPart(0, 1.0)]

    def test_parts_make_one_step_and_are_divided_by_the_whole(self):
        (update, worker), chosen = updating(step=2, samples_per_step=8, samples_per_batch=8), samples(6)
        assert update.train_on(chosen[:3], is_last=False) == update.train_on(chosen[3:5], is_last=False) == []
        metrics = update.train_on(chosen[5:], is_last=True)
        assert worker.parts == [StepPart(0, None), StepPart(1, None), StepPart(2, 6.0)]
        assert worker.positions == [2.0] * 3
        assert {batch.denominators for batches in worker.steps for batch in batches} == {
            Denominators(1.0, 1.0, 64, 1.0)
        }
        assert sum(sizes(worker)) == 6
        num_tokens = sum(sample.num_trained for sample in chosen)
        assert [m.value for m in metrics if m.name == "actor/pg_loss"] == [2.0 * num_tokens] * 3
        assert [m.value for m in metrics if m.name == "actor/backward_steps"] == [1.0]

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_a_part_without_trained_tokens_changes_nothing(self, place):
        """Nothing is sent for it, unless it is the last one, which makes the step."""
        update, worker = updating(samples_per_step=8)
        parts = [samples(2), samples(3)]
        [empty] = samples(1)
        empty.response_mask[:] = False
        parts.insert(place, [empty] if place < 2 else [])
        for number, part in enumerate(parts):
            update.train_on(part, is_last=number == 2)
        made = list(zip([part.divisor for part in worker.parts], sizes(worker), strict=True))
        assert made == ([(None, 2), (None, 3), (5.0, 0)] if place == 2 else [(None, 2), (5.0, 3)])
        assert worker.parts[0].number == 0, "what an earlier step has left behind is forgotten"

    def test_without_any_trained_token_there_is_no_step(self):
        update, worker = updating()
        update.train_on([], is_last=False)
        metrics = update.train_on([], is_last=True)
        assert [(m.name, m.value) for m in metrics] == [
            ("actor/backward_steps", 0.0),
            ("actor/updates_left_out", 0.0),
        ]
        assert worker.steps == []

    @pytest.mark.parametrize(("is_streamed", "is_trained"), [(False, True), (True, True), (True, False)])
    def test_a_step_without_an_advantage_is_left_out_and_counted(self, is_streamed, is_trained):
        update, worker = updating(AdvantageLoss(), is_streamed=is_streamed)
        if is_streamed:
            first = credited(1, 0.0)
            first[0].response_mask &= is_trained
            assert update.train_on(first, is_last=False) == []
        metrics = {m.name: m.value for m in update.train_on(credited(3, 0.0), is_last=True)}
        assert metrics == {
            "actor_train/grad_norm": 0.0,
            "actor/backward_steps": 0.0,
            "actor/updates_left_out": 1.0,
        }
        assert worker.steps == []

    @pytest.mark.parametrize(
        ("advantages", "num_sent"), [((0.0, 0.0, 1.0), 1), ((0.0, 1.0, 0.0), 2), ((1.0, 0.0, 0.0), 2)]
    )
    def test_parts_without_an_advantage_wait_and_no_sample_is_lost(self, advantages, num_sent):
        update, worker = updating(AdvantageLoss(), samples_per_step=8)
        for number, advantage in enumerate(advantages):
            metrics = update.train_on(credited(2, advantage), is_last=number == 2)
        assert sum(sizes(worker)) == 6
        assert [part.divisor for part in worker.parts] == ([1.0] if num_sent == 1 else [None, 6.0])
        assert [m.value for m in metrics if m.name == "actor/updates_left_out"] == [0.0]

    def test_a_loss_with_other_terms_is_trained_without_advantages(self):
        update, worker = updating(AdvantageLoss(needs_advantages=False), is_streamed=False)
        metrics = update.train_on(credited(3, 0.0))
        assert len(worker.steps) == 1
        assert [m.value for m in metrics if m.name == "actor/updates_left_out"] == [0.0]

    def test_a_loss_that_must_see_the_whole_step_is_refused(self):
        with pytest.raises(
            NotAvailableError,
            match=says("PreparedLoss", "stream_training"),
        ):
            updating(PreparedLoss(None))[0].train_on(samples(2), is_last=False)


def test_an_update_is_measured_on_a_few_of_its_tokens_in_the_first_two_steps():
    """The recorder's log-probs are the negative token ids, and those at sampling were 0."""
    own = role()
    many = samples(1) * 4000
    [metric] = log_prob_change(own, many, step=1)
    assert metric.name == "actor/log_prob_change" and metric.value == 2.5, "tokens 2 and 3 of each sample"
    assert own.stopwatch.tokens.unmerged <= 4000 * 4 / 16
    assert log_prob_change(own, many, step=2) == []
    assert log_prob_change(role(first_step=5), many, step=4) == []
    assert len(log_prob_change(own, samples(1), step=0)) == 1, "a small step isn't too small"


def test_an_update_is_measured_on_at_most_256_trained_tokens():
    own = role()
    one = Sample(
        np.arange(10_000), np.arange(10_000) > 99, np.zeros(10_000, np.float32), (TurnSpan(0, 100, 10_000),)
    )
    [metric] = log_prob_change(own, [one], step=0)
    assert metric.value == np.arange(100, 356).mean()
