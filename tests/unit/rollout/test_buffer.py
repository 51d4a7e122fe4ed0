"""The buffer's promises, whatever order groups finish in: the bound, nothing lost, nothing twice, no
deadlock."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from turnwise.rollout.buffer import GroupBuffer
from turnwise.rollout.settings import SchedulerSettings


def settings_of(max_concurrent_groups=8, ratio=1, **settings):
    return SchedulerSettings(
        1, max_concurrent_groups, async_generation_ratio=ratio, **{"max_refill_factor": 0.0, **settings}
    )


def admitted(buffer):
    return list(iter(buffer.admit, None))


def begun(num_groups, **settings):
    """A buffer whose first step, of that many groups, is being collected."""
    buffer = GroupBuffer(settings_of(**settings))
    buffer.begin(num_groups)
    return buffer


def finish(buffer, *indices):
    for index in indices:
        buffer.finish(index)


def choice(buffer):
    """The groups of the step, None while it must wait for one."""
    return sorted(buffer.selected) if buffer.select() else None


class Player:
    """Plays a buffer through steps, drawing what happens next, and checks every promise on the way."""

    def __init__(self, draw, buffer_settings, num_groups):
        self.draw = draw
        self.settings = buffer_settings
        self.buffer = GroupBuffer(buffer_settings)
        self.num_groups = num_groups
        self.admitted_in, self.playing, self.fates = {}, set(), {}

    def admit(self):
        for index in admitted(self.buffer):
            assert index not in self.playing and index not in self.fates
            self.admitted_in.setdefault(index, self.buffer.step)
            self.playing.add(index)
        assert len(self.playing) == self.buffer.num_running <= self.settings.max_concurrent_groups

    def finish_one(self):
        index = self.draw(st.sampled_from(sorted(self.playing)))
        fate = self.draw(st.sampled_from([None, None, None, "failed", "filtered"]))
        self.playing.remove(index)
        if fate:
            self.fates[index] = fate
        self.buffer.finish(index, fate)
        self.admit()

    def resume(self):
        """Goes on from what a checkpoint holds."""
        state = json.loads(json.dumps(self.buffer.state_dict()))
        self.buffer = GroupBuffer(self.settings)
        self.buffer.load_state_dict(state)
        self.playing.clear()

    def play(self, step):
        if self.draw(st.booleans()):
            self.resume()
        self.buffer.begin(self.num_groups)
        self.admit()
        while not self.is_settled():
            assert self.playing, "the step waits for nobody"
            self.finish_one()
        self.take(step)
        for _ in range(self.draw(st.integers(0, len(self.playing)))):  # while the step is trained on
            if self.playing:
                self.finish_one()
        num_alive = len(self.admitted_in) - sum(
            fate in ("failed", "filtered", "stale") for fate in self.fates.values()
        )
        assert num_alive <= (step + 1 + self.settings.async_generation_ratio) * self.num_groups

    def is_settled(self):
        """Whether the step is whole. As one that is streamed is told after any group, or only in the end."""
        before = list(self.buffer.selected)
        if not self.draw(st.booleans()) and not self.can_be_whole():
            return False
        is_whole = self.buffer.select()
        assert self.buffer.selected[: len(before)] == before, "what was given stays"
        assert is_whole == self.can_be_whole(), "however early places were given"
        return is_whole

    def can_be_whole(self):
        """Whether some of those that have finished can be the step, so that all others can be in time."""
        wanted = self.buffer._num_required
        here = [index for index in self.admitted_in if index in self.buffer]
        finished = [index for index in here if self.buffer.has_finished(index)]
        if self.settings.is_ordered:
            return set(sorted(here)[:wanted]) <= set(finished)
        if self.settings.drops_stale:
            return len(finished) >= wanted
        return any(self.is_in_time(set(here) - set(chosen)) for chosen in combinations(finished, wanted))

    def is_in_time(self, others):
        dues = [
            self.admitted_in[index] + self.settings.async_generation_ratio - self.buffer.step
            for index in others
        ]
        return all(
            sum(due <= ahead for due in dues) <= ahead * self.num_groups
            for ahead in range(self.settings.async_generation_ratio + 1)
        )

    def take(self, step):
        chosen = list(self.buffer.selected)
        assert len(set(chosen)) == len(chosen) <= self.num_groups
        for index in chosen:
            assert index not in self.fates and index not in self.playing
            self.fates[index] = "trained"
            assert 0 <= step - self.admitted_in[index] <= self.settings.async_generation_ratio
        for index in self.buffer.close_step():
            assert self.settings.drops_stale and index not in self.fates
            assert step - self.admitted_in[index] >= self.settings.async_generation_ratio
            self.playing.discard(index)
            self.fates[index] = "stale"
        self.admit()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_never_beyond_the_bound_nothing_lost_nothing_twice(data):
    draw = data.draw
    how = settings_of(
        max_concurrent_groups=draw(st.integers(1, 9)),
        ratio=draw(st.integers(0, 3)),
        max_refill_factor=draw(st.sampled_from([0.0, 0.5, 3.0])),
        is_ordered=draw(st.booleans()),
        drops_stale=draw(st.booleans()),
    )
    player = Player(draw, how, num_groups=draw(st.integers(1, 4)))
    num_steps = draw(st.integers(1, 6))
    for step in range(num_steps):
        player.play(step)
    everything = (
        set(player.fates) | player.playing | {index for index in player.admitted_in if index in player.buffer}
    )
    assert everything == set(range(player.buffer.next_index)), (
        "every group is trained on, rejected, or still here"
    )
    assert not any(index in player.buffer for index in player.fates)


def test_what_the_step_left_behind_is_dropped_on_demand():
    buffer = begun(1, drops_stale=True)
    assert admitted(buffer) == [0, 1]
    buffer.finish(1)
    assert choice(buffer) and buffer.close_step() == []
    buffer.begin(1)
    assert admitted(buffer) == [2]
    assert choice(buffer) is None
    buffer.finish(2)
    assert choice(buffer) == [2] and buffer.close_step() == [0]
    assert admitted(buffer) == [3] and buffer.num_running == 1


def test_nothing_is_played_for_steps_that_will_not_come():
    assert admitted(begun(2, ratio=2, num_batches=2)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_filtered", "num_taken"), [(2, 2), (3, 2), (5, 1), (6, 0)])
def test_refills_are_bounded_and_eat_into_the_lead_first(num_filtered, num_taken):
    """Two groups a step, one ahead of it, two refills; from then on each filtered group leaves one place
    less."""
    buffer = begun(2, max_refill_factor=1.0)
    playing = admitted(buffer)
    for _ in range(num_filtered):
        buffer.finish(playing.pop(0), "filtered")
        playing += admitted(buffer)
    finish(buffer, *playing)
    assert len(choice(buffer)) == num_taken


def test_a_run_that_goes_on_with_smaller_batches_keeps_the_bound():
    buffer = begun(4)
    finish(buffer, *admitted(buffer))
    assert choice(buffer) and buffer.close_step() == []
    state, buffer = buffer.state_dict(), GroupBuffer(buffer.settings)
    buffer.load_state_dict(state)
    buffer.begin(1)
    assert choice(buffer) == [4] and buffer.close_step() == [5, 6, 7]


def test_a_group_has_its_place_as_soon_as_it_is_certain():
    """One of the two places is for a group that is due: the first to end of the others has the other one, the
    second waits."""
    buffer = begun(2)
    for index in [*admitted(buffer)[:1], 2]:
        buffer.finish(index)
    assert buffer.select() and buffer.close_step() == []
    buffer.begin(2)
    assert admitted(buffer) == [4, 5]
    for index, selected in ((4, []), (3, [3]), (1, [3, 1])):
        buffer.finish(index)
        assert buffer.select() == (len(selected) == 2) and buffer.selected == selected


def test_a_recorded_step_gets_its_groups_part_by_part():
    buffer = begun(3)
    admitted(buffer)
    buffer.finish(4)
    assert not buffer.select_recorded([4, 0]) and buffer.selected == []
    buffer.finish(0)
    buffer.finish(1)
    assert buffer.select_recorded([4, 0]) and buffer.select_recorded([1]) and buffer.selected == [4, 0, 1]
    assert buffer.close_step() == [] and [index in buffer for index in range(6)] == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]
