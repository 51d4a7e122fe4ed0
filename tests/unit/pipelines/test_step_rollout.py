"""Parts of a step that are waited for one after another."""

from __future__ import annotations

import pytest

from turnwise.pipelines.policy_update import StepRollout
from turnwise.rollout.source import Part
from turnwise.tracking.run_log import RunLog
from turnwise.types import Group, Task


class Watching:
    """A tracker for people: which phases began, and the metrics of the last step."""

    def __init__(self):
        self.phases = []

    def begin_phase(self, name):
        self.phases.append(name)

    def log(self, step, metrics, texts):
        self.metrics = metrics

    def close(self):
        pass


class Source:
    """Hands out one group a part."""

    def __init__(self, num_parts):
        self.num_parts = num_parts
        self.is_closed = False

    def parts(self, num_trajectories, is_streamed):
        assert (num_trajectories, is_streamed) == (8, True)
        try:
            for number in range(self.num_parts):
                yield Part(
                    [Group(Task(id=f"{number}", tag="A", split="train", seed=0), [], number)],
                    number == self.num_parts - 1,
                )
        finally:
            self.is_closed = True


class Config:
    rollout_batch_size = 8
    is_streamed = True


@pytest.mark.parametrize("num_parts", [1, 3])
def test_each_part_is_waited_for_in_a_phase_and_nothing_after_the_last(num_parts):
    watching, source = Watching(), Source(num_parts)
    log = RunLog([watching])
    rollout = StepRollout(source, log, Config())
    assert [part.is_last for part in rollout] == [False] * (num_parts - 1) + [True]
    assert [group.index for group in rollout.groups] == list(range(num_parts))
    assert watching.phases == ["total"] + ["rollout"] * num_parts and source.is_closed
    log.end_step(0)
    assert watching.metrics["time/step_total"] == rollout.elapsed_s >= watching.metrics["time/step_rollout"]
