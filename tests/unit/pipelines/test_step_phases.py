"""The phases of a step, as people who watch it see them, and its ends."""

from __future__ import annotations

import pytest
from small_runs import built, small_config

from turnwise.tracking.jsonl import read_metrics

BEFORE_PARTS = ["model_update", "total"]
PART = ["rollout", "ref_log_probs", "old_log_probs_values", "adv", "train"]
AFTER_PARTS = ["log", "checkpoint"]


class Watching:
    """A tracker for people that notes which phases began."""

    def __init__(self):
        self.phases = []

    def begin_phase(self, name):
        self.phases.append(name)

    def log(self, step, metrics, texts):
        pass

    def close(self):
        pass


def watch(pipeline):
    watching = Watching()
    pipeline.log._watchers.append(watching)
    return watching


def test_each_phase_begins_once_a_step_in_the_documented_order(tiny_model, tmp_path):
    with built(small_config(tiny_model, tmp_path, max_steps=2)) as pipeline:
        watching = watch(pipeline)
        pipeline.run()
    assert watching.phases == 2 * [*BEFORE_PARTS, *PART, *AFTER_PARTS]
    first = read_metrics(pipeline.folder.metrics)[0]
    parts = [value for name, value in first.items() if name.removeprefix("time/step_") in PART]
    assert first["time/step_total"] >= sum(parts) > 0


def test_the_parts_of_a_streamed_step_have_phases_of_their_own(tiny_model, tmp_path):
    config = small_config(
        tiny_model, tmp_path, max_steps=1, async_generation_ratio=1, stream_training=True, save_steps=0
    )
    with built(config) as pipeline:
        watching = watch(pipeline)
        pipeline.run()
    num_parts = watching.phases.count("rollout")
    assert num_parts >= 1
    assert watching.phases == [*BEFORE_PARTS, *num_parts * PART, *AFTER_PARTS]


@pytest.mark.parametrize("end", ["steps", "callback"])
def test_a_run_ends_with_a_checkpoint_whatever_ends_it(tiny_model, tmp_path, end):
    num_steps = 2 if end == "steps" else 5
    with built(small_config(tiny_model, tmp_path, max_steps=num_steps, save_steps=0)) as pipeline:
        reports = []
        for report in pipeline.steps():
            reports.append(report)
            if end == "callback" and report.step == 2:
                pipeline.checkpoints.end_here()
    assert pipeline.is_over
    assert [report.step for report in reports if report.groups] == [1, 2]
    assert pipeline.checkpoints.newest.name == "checkpoint-2"
