"""Parts of a step that are waited for one after another."""

from __future__ import annotations

from contextlib import closing

import pytest

from turnwise.rollout.source import Part
from turnwise.tracking.run_log import RunLog


class Watching:
    """A tracker for people: which phases began."""

    def __init__(self):
        self.phases = []

    def begin_phase(self, name):
        self.phases.append(name)

    def show(self, text):
        pass

    def log(self, step, metrics):
        self.metrics = metrics

    def close(self):
        pass


def stream(num_parts, ended):
    try:
        for number in range(num_parts):
            yield Part([], is_last=number == num_parts - 1)
    finally:
        ended.append(True)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_each_part_is_waited_for_in_a_phase_and_nothing_after_the_last(num_parts):
    watching, ended = Watching(), []
    log = RunLog([watching])
    parts = list(log.each("rollout", stream(num_parts, ended)))
    assert [part.is_last for part in parts] == [False] * (num_parts - 1) + [True]
    assert watching.phases == ["rollout"] * num_parts and ended


def test_parts_that_are_left_early_are_closed():
    ended = []
    with pytest.raises(RuntimeError), closing(RunLog([]).each("rollout", stream(3, ended))) as parts:
        for _ in parts:
            assert not ended
            raise RuntimeError
    assert ended
