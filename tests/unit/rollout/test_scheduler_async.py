"""The scheduler ahead of training: groups go on between batches, the bound holds, and nothing that goes wrong
is lost."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import closing
from itertools import chain

import pytest
from toy_agents import Agent, make_scheduler, number

from turnwise.errors import ConfigError, DataError, RolloutError
from turnwise.rollout.group_filter import GroupFilter
from turnwise.rollout.journal import read_group
from turnwise.rollout.tasks import CurriculumTasks, DataRow, RowTasks, SeededTasks
from turnwise.runtime.schedule_log import ScheduleLog
from turnwise.runtime.stopwatch import Stopwatch, Work


def make(runner, agent, keep=None, tasks=None, **settings):
    """A scheduler that plays one batch ahead; further parts of it may be among the settings."""
    base = {"max_concurrent_groups": 4, "async_generation_ratio": 1, "max_env_retries": 0}
    parts = {name: settings.pop(name) for name in ("stopwatch", "schedule_log") if name in settings}
    tasks = tasks or SeededTasks(run_seed=1, split="train", tags=("A",), partition=(1,))
    return make_scheduler(runner, agent, keep, tasks, parts=parts, **(base | settings))


def turn_loop(runner, num_turns=200):
    async def turn():
        for _ in range(num_turns):
            await asyncio.sleep(0)

    runner.run(turn())


def train(runner, scheduler, agent, num_steps, num_turns=20, num_trajectories=4):
    """Steps with training in between; the oldest version that each was trained on, and all groups."""
    staleness, groups = [], []
    for step in range(num_steps):
        agent.version = step
        batch = scheduler.get_batch(num_trajectories)
        versions = [t.turns[0].versions[0].version for group in batch for t in group.trajectories]
        staleness.append(step - min(versions, default=step))
        groups += batch
        turn_loop(runner, num_turns)
    scheduler.close()
    return staleness, groups


def test_groups_end_while_nobody_waits_for_a_batch(runner):
    agent = Agent()
    scheduler = make(runner, agent)
    scheduler.get_batch(4)
    turn_loop(runner)
    assert len(agent.ended) == 8, "one batch was trained on, one is there"
    turn_loop(runner)
    assert len(agent.started) == 8, "no further ahead"
    scheduler.close()


def test_the_stopwatch_knows_whether_anybody_plays(runner):
    agent, stopwatch = Agent(num_turns=lambda task, sibling: 50 if number(task) > 1 else 5), Stopwatch()
    scheduler = make(runner, agent, stopwatch=stopwatch)
    scheduler.get_batch(4)
    assert stopwatch.num_playing == 2, "those of the next batch"
    turn_loop(runner)
    assert stopwatch.num_playing == 0, "held by the bound"
    scheduler.get_batch(4)
    turn_loop(runner, 2)
    assert stopwatch.num_playing == 2
    scheduler.close()
    assert stopwatch.num_playing == 0, "ended in the middle"


@pytest.mark.parametrize(
    "settings", [{}, {"is_ordered": True}, {"has_greedy_sibling": True}, {"group_size_redundancy": 1}]
)
def test_a_batch_that_waits_is_not_shown_as_complete(runner, settings):
    """The first group takes long, and groups of later batches end meanwhile."""
    agent = Agent(num_turns=lambda task, sibling: 5 if number(task) else 200)
    stopwatch = Stopwatch()
    scheduler = make(runner, agent, stopwatch=stopwatch, max_concurrent_groups=8, **settings)
    shown = []

    async def watch():
        while True:
            shown.append((stopwatch.work.num_done, stopwatch.work.total or 1))
            await asyncio.sleep(0)

    watcher = runner.get_loop().create_task(watch())
    for _ in range(2):
        shown.clear()
        stopwatch.work = Work()  # as a new phase does
        scheduler.get_batch(4)
        assert stopwatch.work.num_done == stopwatch.work.total
        assert sum(done >= total for done, total in shown) <= 3, "as it is taken"
    assert len(agent.ended) >= 8
    watcher.cancel()
    turn_loop(runner, 1)
    scheduler.close()


def test_after_the_last_batch_nothing_plays(runner):
    agent = Agent()
    train(runner, make(runner, agent, num_batches=2), agent, num_steps=2, num_turns=100)
    assert len(agent.started) == 8


@pytest.mark.parametrize("fault", [ConfigError("unknown placeholder"), RuntimeError("the lake is dry")])
def test_an_error_while_training_surfaces_in_the_next_batch(runner, fault):
    agent = Agent(num_turns=lambda task, sibling: 1 if number(task) < 2 else 50)
    scheduler = make(runner, agent, max_failed_fraction=0.0)
    scheduler.get_batch(4)
    agent.fails = lambda *_: fault
    turn_loop(runner)
    with pytest.raises((ConfigError, RolloutError), match=str(fault)):
        scheduler.get_batch(4)
    assert agent.num_running == 0 and not asyncio.all_tasks(runner.get_loop())
    agent.fails = lambda *_: None
    assert sorted(group.index for group in scheduler.get_batch(4)) == [2, 3], (
        "what was dropped is played again"
    )
    scheduler.close()


def test_failures_while_training_are_allowed_as_many_as_in_a_batch(runner):
    agent = Agent(num_turns=lambda task, sibling: 1 if number(task) < 2 else 50)
    agent.fails = lambda task, sibling, *_: ValueError("bad") if number(task) == 2 and sibling == 0 else None
    scheduler = make(runner, agent, max_failed_fraction=0.25)
    scheduler.get_batch(4)
    turn_loop(runner)
    assert [group.index for group in scheduler.get_batch(4)] == [3, 4]
    scheduler.close()


def test_a_filter_that_breaks_while_training_surfaces_too(runner):
    scheduler = make(runner, Agent(), keep=GroupFilter("mine", lambda group: 1 / (3 - group.index) > -1))
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        for _ in range(6):
            scheduler.get_batch(2)
            turn_loop(runner)


def test_filtered_and_failed_groups_are_replaced_ahead_of_time(runner):
    agent = Agent()
    agent.fails = lambda task, sibling, *_: ValueError("bad") if number(task) == 4 else None
    keep = GroupFilter("odd", lambda group: group.index % 2 == 1)
    scheduler = make(runner, agent, keep=keep, max_failed_fraction=0.5)
    rejected = []
    for step in range(4):
        agent.version = step
        batch = scheduler.get_batch(4)
        rejected += [(group.index, group.rejected) for group in scheduler.rejected]
        assert len(batch) == 2 and all(group.index % 2 for group in batch)
        turn_loop(runner)
    assert (4, "failed") in rejected and (0, "filtered") in rejected
    assert len(set(rejected)) == len(rejected)
    scheduler.close()


def test_a_batch_that_the_filter_leaves_nothing_of_comes_back_empty(runner, caplog):
    scheduler = make(runner, Agent(), keep=GroupFilter("none", lambda group: False), max_refill_factor=1.0)
    for _ in range(3):
        assert scheduler.get_batch(4) == []
        turn_loop(runner)
    assert "this step trains on nothing" in caplog.text
    scheduler.close()


def test_stale_groups_are_dropped_on_demand_and_their_episodes_end(runner):
    agent = Agent(num_turns=lambda task, sibling: 10_000 if number(task) == 0 else 1)
    scheduler = make(runner, agent, drops_stale=True)
    indices = []
    for step in range(3):
        agent.version = step
        indices += [group.index for group in scheduler.get_batch(4)]
        turn_loop(runner, 20)
    assert 0 not in indices and len(indices) == 6
    assert 0 not in scheduler._running
    scheduler.close()
    assert agent.num_running == 0


def test_a_straggler_at_the_bound_is_waited_for(runner):
    agent = Agent(num_turns=lambda task, sibling: 500 if number(task) == 0 else 1)
    staleness, groups = train(runner, make(runner, agent), agent, num_steps=3)
    assert [group.index for group in groups][2] == 0 and staleness[1] == 1


def test_ctrl_c_in_a_later_batch_leaves_nothing_behind(runner):
    agent = Agent(num_turns=lambda task, sibling: 10)
    scheduler = make(runner, agent)
    scheduler.get_batch(4)

    def press(task, sibling, attempt):
        if number(task) == 5 and sibling == 1:
            signal.raise_signal(signal.SIGINT)

    agent.fails = press
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            scheduler.get_batch(4)
    assert agent.num_running == 0 and not asyncio.all_tasks(runner.get_loop())


def test_finished_groups_survive_a_checkpoint_and_the_others_restart_with_their_seeds(runner):
    slow = lambda task, sibling: 10_000 if number(task) == 3 else 1  # noqa: E731
    agent = Agent(num_turns=slow)
    scheduler = make(runner, agent)
    first = scheduler.get_batch(4)
    turn_loop(runner)
    state = json.loads(json.dumps(scheduler.state_dict()))
    scheduler.close()
    assert [index for index, _ in state["playing"]] == [3] and [
        read_group(lines).index for lines in state["groups"]
    ] == [2]
    seeds = {(index, sibling): seed for index, sibling, seed in agent.started}

    again = Agent()
    resumed = make(runner, again)
    resumed.load_state_dict(state)
    again.version = 1
    second = resumed.get_batch(4)
    assert [group.index for group in first + second] == [0, 1, 2, 3]
    assert [t.samples[0].num_tokens for group in second for t in group.trajectories] == [3] * 4
    assert {index for index, _, _ in again.started} >= {3, 4, 5} and 2 not in {
        index for index, _, _ in again.started
    }
    assert all(
        seed == seeds[index, sibling] for index, sibling, seed in again.started if (index, sibling) in seeds
    )
    versions = [group.trajectories[0].turns[0].versions[0].version for group in second]
    assert versions == [0, 1], "one was played before, one after"
    resumed.close()


@pytest.mark.parametrize("changed", [{"group_size": 3}, {"has_greedy_sibling": True}])
def test_finished_groups_that_do_not_fit_the_resumed_run_are_played_again(runner, changed):
    scheduler = make(runner, Agent())
    scheduler.get_batch(4)
    turn_loop(runner)
    state = json.loads(json.dumps(scheduler.state_dict()))
    scheduler.close()
    resumed = make(runner, Agent(), **changed)
    resumed.load_state_dict(state)
    size = changed.get("group_size", 2)
    batch = resumed.get_batch(2 * size)
    resumed.close()
    assert [(group.index, len(group.trajectories)) for group in batch] == [(2, size), (3, size)]
    assert all(group.greedy for group in batch) == ("has_greedy_sibling" in changed)


def test_ctrl_c_while_stale_episodes_end_leaves_nothing_behind(runner):
    class Reluctant(Agent):
        async def run(self, task, sibling, open_conversation, sampling):
            try:
                return await super().run(task, sibling, open_conversation, sampling)
            except asyncio.CancelledError:
                if (number(task), sibling) == (0, 0):
                    signal.raise_signal(signal.SIGINT)
                raise

    agent = Reluctant(num_turns=lambda task, sibling: 10_000 if number(task) in (0, 5) else 1)
    scheduler = make(runner, agent, drops_stale=True)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            scheduler.get_batch(4)
    assert agent.num_running == 0 and not asyncio.all_tasks(runner.get_loop())


class TestRedundancy:
    def test_the_first_to_end_are_the_group_and_the_others_are_cancelled(self, runner):
        agent = Agent(num_turns=lambda task, sibling: 10_000 if sibling in (0, 2) else 1)
        scheduler = make(runner, agent, async_generation_ratio=0, group_size_redundancy=2)
        for group in scheduler.get_batch(4):
            assert [t.sibling for t in group.trajectories] == [1, 3]
        assert agent.num_running == 0 and len(agent.started) == 8

    def test_one_that_is_cancelled_is_not_played_again_if_its_clean_up_fails(self, runner):
        class Clumsy(Agent):
            async def run(self, *arguments):
                try:
                    return await super().run(*arguments)
                except asyncio.CancelledError:
                    raise OSError("it can't be closed") from None

        agent = Clumsy(num_turns=lambda task, sibling: 1000 if sibling == 0 else 1)
        scheduler = make(runner, agent, async_generation_ratio=0, group_size_redundancy=1, max_env_retries=1)
        assert [t.sibling for group in scheduler.get_batch(4) for t in group.trajectories] == [1, 2] * 2
        assert set(agent.attempts.values()) == {1} and agent.num_running == 0

    def test_a_failed_episode_is_replaced_by_one_that_ended_well(self, runner):
        agent = Agent()
        agent.fails = lambda task, sibling, *_: ValueError("bad") if sibling == 0 else None
        scheduler = make(runner, agent, async_generation_ratio=0, group_size_redundancy=1)
        assert [t.sibling for t in scheduler.get_batch(2)[0].trajectories] == [1, 2]

    def test_without_enough_good_ones_the_group_has_failed(self, runner):
        agent = Agent()
        agent.fails = lambda task, sibling, *_: (
            ValueError("bad") if number(task) == 0 and sibling != 1 else None
        )
        scheduler = make(
            runner, agent, async_generation_ratio=0, group_size_redundancy=1, max_failed_fraction=0.5
        )
        assert [group.index for group in scheduler.get_batch(4)] == [1, 2]
        assert [t.status for t in scheduler.rejected[0].trajectories] == ["failed", "finished"]

    def test_the_greedy_sibling_is_always_waited_for(self, runner):
        agent = Agent(num_turns=lambda task, sibling: 50 if sibling == 3 else 1)
        scheduler = make(
            runner, agent, async_generation_ratio=0, group_size_redundancy=1, has_greedy_sibling=True
        )
        [group] = scheduler.get_batch(2)
        assert group.greedy.sibling == 3 and group.greedy.turns[0].is_greedy


# A batch that is handed out part by part


def played(scheduler, num_trajectories=4, while_trained=lambda: None):
    """The indices of each part of the next batch."""
    parts = []
    with closing(scheduler.parts(num_trajectories, is_streamed=True)) as stream:
        for part in stream:
            assert part.is_last or part.groups
            parts.append([group.index for group in part.groups])
            while_trained()
    return parts


def slow(*slow_ones):
    return lambda task, sibling: 300 if number(task) in slow_ones else 1 + number(task)


def test_a_group_is_handed_out_while_its_batch_is_still_played(runner):
    agent = Agent(num_turns=slow(1))
    scheduler = make(runner, agent, async_generation_ratio=0, max_concurrent_groups=2)
    seen = []
    assert played(scheduler, while_trained=lambda: seen.append(agent.num_running)) == [[0], [1]]
    assert seen == [2, 0] and scheduler.num_episodes == 4
    assert [group.index for group in scheduler.finished] == [0, 1]


def test_what_ends_while_a_part_is_trained_on_is_the_next_part(runner):
    scheduler = make(
        runner, Agent(num_turns=lambda task, sibling: 10 * (1 + number(task))), async_generation_ratio=0
    )
    assert played(scheduler, 8, while_trained=lambda: turn_loop(runner, 21)) == [[0], [1, 2], [3]]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("num_turns", [0, 7, 100])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_no_group_is_beyond_the_bound_lost_or_twice_there(runner, ratio, num_turns, is_ordered, is_streamed):
    agent = Agent()
    scheduler = make(
        runner, agent, async_generation_ratio=ratio, is_ordered=is_ordered, max_concurrent_groups=3
    )
    indices, staleness = [], []
    for step in range(8):
        agent.version = step
        with closing(scheduler.parts(4, is_streamed)) as stream:
            for part in stream:
                indices += [group.index for group in part.groups]
                versions = [
                    t.turns[0].versions[0].version for group in part.groups for t in group.trajectories
                ]
                staleness.append(step - min(versions, default=step))
                turn_loop(runner, num_turns)
    assert len(indices) == len(set(indices)) == 16 and scheduler.num_episodes == 32
    assert max(staleness) == ratio if num_turns == 100 and not is_streamed else max(staleness) <= ratio
    assert len(staleness) > 8 if num_turns < 7 and is_streamed else len(staleness) >= 8
    assert all(index in scheduler._buffer for index in set(range(max(indices))) - set(indices))
    if is_ordered:
        assert all(set(indices[: 2 * step]) == set(range(2 * step)) for step in range(8))
        assert is_streamed or indices == list(range(16))
    scheduler.close()


def test_a_batch_that_is_left_early_is_played_again(runner):
    agent = Agent(num_turns=slow(1))
    scheduler = make(runner, agent)
    with closing(scheduler.parts(4, is_streamed=True)) as stream:
        assert [group.index for group in next(stream).groups] == [0]
    assert scheduler.num_episodes == 0
    assert [sorted(chain(*played(scheduler))) for _ in range(2)] == [[0, 2], [1, 3]]
    scheduler.close()
    assert agent.num_running == 0


def test_closing_the_scheduler_ends_a_batch_that_was_left(runner):
    agent = Agent(num_turns=slow(1))
    scheduler = make(runner, agent)
    for part in scheduler.parts(4, is_streamed=True):
        assert not part.is_last and agent.num_running
        break
    scheduler.close()
    assert agent.num_running == 0


def test_an_error_between_two_parts_ends_the_batch(runner):
    agent = Agent(num_turns=slow(1, 2, 3))
    scheduler = make(runner, agent, max_failed_fraction=0.0)

    def break_it():
        agent.fails = lambda *_: RuntimeError("the lake is dry")

    with pytest.raises(RolloutError, match="the lake is dry"):
        played(scheduler, while_trained=break_it)
    assert agent.num_running == 0 and not asyncio.all_tasks(runner.get_loop())


def test_where_a_filter_leaves_fewer_the_last_part_may_be_empty(runner):
    agent, keep = Agent(num_turns=slow(1)), GroupFilter("first", lambda group: group.index == 0)
    scheduler = make(runner, agent, keep, async_generation_ratio=0, max_refill_factor=0.0)
    assert played(scheduler) == [[0], []] and [group.index for group in scheduler.rejected] == [1]
    assert played(scheduler) == [[]]


def test_a_record_is_followed_part_by_part(runner, tmp_path):
    log = tmp_path / "schedule_log.jsonl"
    first = make(runner, Agent(), async_generation_ratio=2, schedule_log=ScheduleLog(log))
    batches = [played(first, while_trained=lambda: turn_loop(runner, 5)) for _ in range(5)]
    first.close()
    assert any(len(parts) > 1 for parts in batches)
    agent = Agent(num_turns=lambda task, sibling: 40 - 3 * (task.seed % 11))
    again = make(runner, agent, async_generation_ratio=2, schedule_log=ScheduleLog(recorded=log))
    assert [played(again) for _ in range(5)] == batches
    with pytest.raises(DataError, match="ends after 5 batches"):
        played(again)
    again.close()


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_record_s_rejected_groups_are_waited_for(runner, tmp_path, ratio):
    """A replay waits until the groups that the filter had rejected before the batch are rejected again."""
    keep = GroupFilter("first", lambda group: group.index == 0)
    how, log = {"async_generation_ratio": ratio, "max_refill_factor": 0.0}, tmp_path / "schedule_log.jsonl"
    first = make(runner, Agent(), keep, schedule_log=ScheduleLog(log), **how)
    parts, rejected = played(first), [(group.index, group.rejected) for group in first.rejected]
    first.close()
    assert (1, "filtered") in rejected
    again = make(runner, Agent(num_turns=slow(1, 2, 3)), keep, schedule_log=ScheduleLog(recorded=log), **how)
    assert played(again) == parts and [(group.index, group.rejected) for group in again.rejected] == rejected
    again.close()


def recorded(folder, *events):
    """The log to follow of a run with these events."""
    log = folder / "schedule_log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    return ScheduleLog(recorded=log)


def test_a_group_that_a_replay_rejects_early_belongs_to_the_batch_of_the_record(runner, tmp_path):
    """The trainer of the replay may be slower: groups that were rejected after a batch was taken then end
    before."""
    log = recorded(tmp_path, {"batch": 0, "groups": [0, 1]}, {"batch": 1, "groups": [3, 4], "rejected": [2]})
    keep = GroupFilter("all but 2", lambda group: group.index != 2)
    again = make(runner, Agent(num_turns=slow(0, 1)), keep, max_refill_factor=1.0, schedule_log=log)
    left = []
    for _ in range(2):
        parts = played(again)
        left.append((parts, [group.index for group in again.rejected]))
    assert left == [([[0, 1]], []), ([[3, 4]], [2])]
    again.close()


def test_failures_of_two_recorded_batches_may_fall_into_one_of_the_replay(runner, tmp_path):
    log = recorded(
        tmp_path, {"batch": 0, "groups": [0, 1]}, {"batch": 1, "groups": [4, 5], "rejected": [2, 3]}
    )
    agent = Agent(num_turns=slow(0, 1))
    agent.fails = lambda task, sibling, *_: (
        RuntimeError("the lake is dry") if number(task) in (2, 3) else None
    )
    again = make(runner, agent, max_failed_fraction=0.0, schedule_log=log)
    assert [played(again) for _ in range(2)] == [[[0, 1]], [[4, 5]]]
    assert [(group.index, group.rejected) for group in again.rejected] == [(2, "failed"), (3, "failed")]
    again.close()


@pytest.mark.parametrize(
    ("kept_here", "said"),
    [
        (2, "group 0 was trained on in .* and is rejected here"),
        (5, "group 1 was rejected in .* and would be trained on here"),
    ],
)
def test_a_replay_that_decides_otherwise_about_a_group_ends(runner, tmp_path, kept_here, said):
    """It would wait for ever."""
    log = recorded(tmp_path, {"batch": 0, "groups": [0, 2], "rejected": [1]})
    keep = GroupFilter("some", lambda group: kept_here == 5 or group.index >= kept_here)
    again = make(runner, Agent(), keep, max_refill_factor=4.0, schedule_log=log)
    with pytest.raises(DataError, match=said):
        played(again)
    again.close()


def test_a_complete_group_is_scored_at_once_before_the_filter_and_beside_others(runner):
    scoring, seen = set(), []

    async def score(group):
        scoring.add(group.index)
        for _ in range(20):
            await asyncio.sleep(0)
        seen.append((group.index, len(scoring), 3 in {index for index, _ in agent.ended}))
        scoring.remove(group.index)
        for trajectory in group.trajectories:
            trajectory.outcome_rewards["judge"] = float(group.index)
        return []

    agent = Agent(num_turns=lambda task, sibling: 60 if number(task) == 3 else 1)
    keep = GroupFilter(
        "scored",
        lambda group: all("judge" in trajectory.outcome_rewards for trajectory in group.trajectories),
    )
    scheduler = make(runner, agent, keep, async_generation_ratio=0)
    scheduler.score = score
    assert [group.index for group in scheduler.get_batch(8)] == [0, 1, 2, 3] and not scheduler.rejected
    assert [index for index, _, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1] == 3, "the first three groups are scored together"
    assert [is_over for _, _, is_over in seen] == [False, False, False, True], (
        "they are scored while the last one plays"
    )


def test_a_group_that_a_checkpoint_starts_again_has_the_task_of_its_admission(runner):
    """A curriculum's weights have changed since then."""

    async def score(group):
        for trajectory in group.trajectories:
            trajectory.metrics["success"] = float(group.task.row < 15 or trajectory.sibling)
        return []

    def begin():
        rows = RowTasks(
            1, "train", [DataRow("data", "single_turn_agent", {"prompt": str(n)}) for n in range(60)]
        )
        tasks = CurriculumTasks(1, "train", ("data",), {}, rows, "data")
        agent = Agent(num_turns=lambda task, sibling: 5 * number(task))
        scheduler = make(runner, agent, tasks=tasks, is_ordered=True, max_concurrent_groups=32)
        scheduler.score = score
        return scheduler, tasks

    (whole, tasks), (resumed, _) = begin(), begin()
    whole.get_batch(32)
    whole.get_batch(32)
    newest, state = tasks.version, json.loads(json.dumps(whole.state_dict()))
    ahead = [group.task for group in whole.get_batch(32)]
    assert len(state["playing"]) > 4 and ahead != [tasks.task(number(task), newest) for task in ahead]
    resumed.load_state_dict(state)
    assert [group.task for group in resumed.get_batch(32)] == ahead
    whole.close()
    resumed.close()
