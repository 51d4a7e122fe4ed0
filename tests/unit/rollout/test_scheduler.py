"""The scheduler with hand-written agents: grouping, order, concurrency, retries, refills, limits."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from toy_agents import Agent, make_scheduler as make, number

from turnwise.errors import (
    BlockingFault,
    CheckpointError,
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    RolloutError,
)
from turnwise.rollout.group_filter import GroupFilter
from turnwise.rollout.tasks import DataRow, RowTasks
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog


def test_batch_is_complete_groups_in_order_of_admission(runner):
    scheduler = make(runner, Agent())
    first, second = scheduler.get_batch(8), scheduler.get_batch(4)
    assert [g.index for g in first + second] == [0, 1, 2, 3, 4, 5]
    assert all([t.sibling for t in g.trajectories] == [0, 1] for g in first)
    assert [g.task.tag for g in first] == ["A", "B", "A", "B"]
    assert all(t.samples[0].num_tokens == 3 for g in first for t in g.trajectories)


def test_at_most_the_configured_groups_run_at_once(runner):
    agent = Agent()
    make(runner, agent, max_concurrent_groups=2).get_batch(16)
    assert agent.max_running == 4


def test_an_agent_with_places_plays_so_many_episodes_at_once(runner):
    agent = Agent()
    agent.places = asyncio.Semaphore(3)
    make(runner, agent).get_batch(16)
    assert agent.max_running == 3


def test_siblings_sample_with_their_own_seeds_and_a_retry_with_the_same(runner):
    agent = Agent(fails=lambda task, sibling, attempt: ValueError("once") if attempt == 1 else None)
    make(runner, agent, max_env_retries=1).get_batch(4)
    assert set(Counter(agent.started).values()) == {2}
    assert len({seed for *_, seed in agent.started}) == len(agent.attempts) == 4


def test_a_group_that_fails_for_good_is_replaced_by_another_task(runner):
    agent = Agent(
        fails=lambda task, sibling, attempt: ValueError("bad") if task.id.endswith("/1") and sibling else None
    )
    scheduler = make(runner, agent, max_failed_fraction=0.5)
    groups = scheduler.get_batch(8)
    assert [g.index for g in groups] == [0, 2, 3, 4]
    [rejected] = scheduler.rejected
    assert rejected.index == 1 and [t.status for t in rejected.trajectories] == ["finished", "failed"]
    assert agent.attempts[1, 1] == 3


def test_validation_plays_the_same_tasks_each_time_and_keeps_failures(runner):
    agent = Agent(fails=lambda task, sibling, attempt: ValueError("bad") if task.id.endswith("/1") else None)
    scheduler = make(runner, agent, is_fixed=True, group_size=1, max_failed_fraction=0.5)
    first, second = scheduler.get_batch(4), scheduler.get_batch(4)
    assert [g.task for g in first] == [g.task for g in second]
    assert [t.status for g in first for t in g.trajectories] == ["finished", "failed", "finished", "finished"]
    assert "ValueError: bad" in first[1].trajectories[0].error


def test_too_many_failures_stop_the_run_and_name_the_most_frequent_error(runner):
    agent = Agent(fails=lambda task, sibling, attempt: ValueError("the lake is dry"))
    with pytest.raises(RolloutError, match=r"(?s)max_failed_fraction.*\(2×\).*the lake is dry"):
        make(runner, agent).get_batch(8)


def test_failures_are_judged_as_they_come(runner):
    failed = []

    def fails(task, sibling, attempt):
        failed.append((task.id, sibling))
        return ValueError("the lake is dry")

    scheduler = make(runner, Agent(fails), group_size=16, max_env_retries=0)
    with pytest.raises(RolloutError, match=r"^4 episodes of this batch of 16 failed"):
        scheduler.get_batch(16)
    assert len(failed) < 8, "no other sibling is waited for"
    [group] = scheduler.rejected
    assert group.rejected == "failed" and [t.sibling for t in group.trajectories] == [
        sibling for _, sibling in failed
    ]


@pytest.mark.parametrize(
    "fault",
    [BlockingFault("Lake.step took too long"), RolloutError("the first prompt has 99 tokens")],
    ids=["blocks", "is long"],
)
def test_an_episode_that_would_hold_up_all_others_or_not_fit_again_is_not_tried_again(runner, fault):
    agent = Agent(fails=lambda *_: fault)
    with pytest.raises(RolloutError, match=str(fault)):
        make(runner, agent).get_batch(2)
    assert set(agent.attempts.values()) == {1}


class Stuck(Agent):
    """Never ends: it awaits what doesn't come, or blocks the event loop of everybody."""

    def __init__(self, is_blocking):
        super().__init__()
        self._is_blocking = is_blocking

    async def run(self, task, sibling, open_conversation, sampling):
        await asyncio.sleep(0)
        if self._is_blocking:
            threading.Event().wait()
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_blocking", [False, True])
def test_an_episode_without_end_is_timed_out_by_name(is_blocking):
    watchdog = Watchdog(grace_s=5.0)
    with WatchedRunner(watchdog) as runner:
        scheduler = make(
            runner,
            Stuck(is_blocking),
            parts={"watchdog": watchdog},
            episode_timeout_s=0.05,
            max_env_retries=0,
        )
        with pytest.raises(
            RolloutError, match=r"waited 0\.05 s for an episode of A to end; raise episode_timeout_s"
        ) as caught:
            scheduler.get_batch(2)
    assert "wait()" in str(caught.value), "the stack is shown"


def test_what_never_yields_ends_the_run_even_without_a_time_limit():
    watchdog = Watchdog(grace_s=5.0)
    with WatchedRunner(watchdog, iteration_s=0.05) as runner, pytest.raises(DeadlineError) as caught:
        make(runner, Stuck(is_blocking=True), parts={"watchdog": watchdog}).get_batch(2)
    assert "the event loop waited 0.05 s for a task that blocks it; raise deadlines.env_s" in str(
        caught.value
    )
    assert "MainThread in task 'episode train/A/0/" in str(caught.value)


STACKS = EnvironmentFault("an episode waited\n  thread MainThread:\n    somewhere.py:1 in step: sleep()")
OF_A_GROUP = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("the lake is dry")])


@pytest.mark.parametrize(
    ("fault", "line"), [(STACKS, "an episode waited"), (OF_A_GROUP, "ValueError: the lake is dry")]
)
def test_the_headline_of_an_error_is_no_stack_and_one_exception_of_a_group(runner, caplog, fault, line):
    with pytest.raises(RolloutError, match=rf"(?s)most frequent error \(2×\).*{line}"):
        make(runner, Agent(fails=lambda *_: fault), max_env_retries=0, max_failed_fraction=0.5).get_batch(2)
    assert [record.getMessage().partition("failed: ")[2] for record in caplog.records] == [line] * 2


@pytest.mark.parametrize("reward", [float("nan"), "1", None])
def test_a_reward_of_an_agent_that_is_no_number_fails_its_episode(runner, reward):
    message = r"the agent of [AB], turn 1: the reward is .* must be a finite number"
    with pytest.raises(RolloutError, match=message):
        make(runner, Agent(reward=lambda *_: reward), max_env_retries=0).get_batch(2)


def test_numbers_of_numpy_are_an_agent_s_rewards_too(runner):
    groups = make(runner, Agent(reward=lambda *_: np.float32(0.5))).get_batch(4)
    assert {type(turn.reward) for g in groups for t in g.trajectories for turn in t.turns} == {float}


def test_an_agent_that_returns_nothing_fails_its_episode(runner):
    class Silent(Agent):
        async def run(self, *arguments):
            await super().run(*arguments)
            return []

    with pytest.raises(
        RolloutError, match=r"the agent of [AB] returned no trajectory; its `run` returns at least one"
    ):
        make(runner, Silent(), max_env_retries=0).get_batch(2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 1.0], "the agent Parts of [AB] .*add up to 2;.*weight=0.5"),
        ([0.5], "the agent Parts of [AB] .*add up to 0.5;.*weight=1"),
        ([1.5, -0.5], "the agent Parts of [AB] .*weight -0.5"),
        ([float("nan"), 1.0], "the agent Parts of [AB] .*weight nan"),
        (["1"], "the agent Parts of [AB] .*weight '1'"),
    ],
)
def test_weights_of_an_episode_that_do_not_add_up_to_1_fail_it(runner, weights, message):
    with pytest.raises(RolloutError, match=message):
        make(runner, Parts(weights), max_env_retries=0).get_batch(2)


def test_thirds_add_up_to_1(runner):
    [first, *_] = make(runner, Parts([1 / 3, 1 / 3, 1 / 3])).get_batch(4)
    assert [trajectory.weight for trajectory in first.trajectories[:3]] == [1 / 3] * 3


class Parts(Agent):
    """Returns several trajectories an episode, with these weights."""

    def __init__(self, weights):
        super().__init__()
        self._weights = weights

    async def run(self, *arguments):
        [trajectory] = await super().run(*arguments)
        return [replace(trajectory, weight=weight) for weight in self._weights]


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        (lambda *_: ConfigError("stop"), ConfigError),
        (lambda *_: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    ],
)
def test_a_batch_that_is_dropped_is_played_again(runner, fails, kind):
    agent = Agent()
    scheduler = make(runner, agent)
    first = scheduler.get_batch(4)
    agent.fails = fails
    with pytest.raises(kind):
        scheduler.get_batch(4)
    agent.fails = lambda task, sibling, attempt: None
    assert [group.index for group in first + scheduler.get_batch(4)] == [0, 1, 2, 3]


def test_a_timeout_of_the_environment_itself_keeps_its_message(runner):
    agent = Agent(fails=lambda task, sibling, attempt: TimeoutError("socket to my server timed out"))
    with pytest.raises(RolloutError, match="socket to my server timed out"):
        make(runner, agent, max_env_retries=0).get_batch(2)


@pytest.mark.parametrize("has_greedy_sibling", [False, True])
def test_siblings_that_start_differently_are_refused(runner, has_greedy_sibling):
    """The greedy sibling, the third one, must start like the others too."""
    agent = Agent(
        observation=lambda task, sibling: f"start {sibling // 2 if has_greedy_sibling else sibling}"
    )
    with pytest.raises(EnvironmentFault, match="start differently"):
        make(runner, agent, has_greedy_sibling=has_greedy_sibling).get_batch(2)


def test_a_batch_of_broken_groups_is_refused(runner):
    with pytest.raises(ConfigError, match="multiple"):
        make(runner, Agent()).get_batch(3)


def test_the_position_survives_a_round_trip(runner):
    agent = Agent()
    scheduler, other = make(runner, agent), make(runner, agent)
    scheduler.get_batch(6)
    other.load_state_dict(scheduler.state_dict())
    assert other.get_batch(2)[0].index == 3


THIRDS = GroupFilter("thirds", lambda group: number(group.task) % 3 == 0)


def test_groups_that_the_filter_rejects_are_replaced(runner):
    scheduler = make(runner, Agent(), keep=THIRDS)
    groups = scheduler.get_batch(6)
    assert [g.index for g in groups] == [0, 3, 6] and all(g.rejected is None for g in groups)
    assert [(g.index, g.rejected) for g in scheduler.rejected] == [(i, "filtered") for i in (1, 2, 4, 5)]
    assert [g.index for g in scheduler.get_batch(2)] == [9], "no task is played twice, and none is left out"


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_which_groups_are_kept_does_not_depend_on_how_many_run_at_once(runner, at_once):
    agent = Agent(fails=lambda task, sibling, attempt: ValueError("bad") if number(task) == 3 else None)
    scheduler = make(
        runner,
        agent,
        keep=THIRDS,
        max_concurrent_groups=at_once,
        max_refill_factor=1.0,
        max_failed_fraction=0.5,
    )
    assert [g.index for g in scheduler.get_batch(8)] == [0, 6]
    assert [g.rejected for g in scheduler.rejected] == ["filtered"] * 2 + ["failed"] + ["filtered"] * 4
    assert scheduler.state_dict()["next_index"] == 9 and scheduler.num_episodes == 4, (
        "8 groups that count, and one that failed"
    )


def test_refills_are_bounded_and_what_is_left_is_said(runner, caplog):
    scheduler = make(runner, Agent(), keep=GroupFilter("none", lambda group: False), max_refill_factor=2.0)
    assert scheduler.get_batch(8) == [] and len(scheduler.rejected) == 4 + 8
    assert "group_filter none kept 0 of 12 groups" in caplog.text and "trains on nothing" in caplog.text
    scheduler = make(runner, Agent(), keep=THIRDS, max_refill_factor=0.5)
    assert len(scheduler.get_batch(8)) == 2
    assert "training on 2 groups instead of 4" in caplog.text
    scheduler = make(runner, Agent(), keep=GroupFilter("none", lambda group: False), max_refill_factor=0.29)
    assert scheduler.get_batch(200) == [] and len(scheduler.rejected) == 100 + 29


@pytest.mark.parametrize(
    ("dropped", "said"), [((), ""), ((4,), "group_filter mine kept 0 of 1 groups, and no task is left: ")]
)
def test_a_last_batch_is_short_since_the_rows_are_used_up(runner, caplog, dropped, said):
    rows = RowTasks(
        1,
        "train",
        [DataRow("data", "agent", {"prompt": str(n)}) for n in range(5)],
        shuffle=False,
        num_epochs=1,
    )
    keep = GroupFilter("mine", lambda group: group.task.row not in dropped)
    scheduler = make(runner, Agent(), keep=keep, tasks=rows, max_refill_factor=2.0)
    assert [len(scheduler.get_batch(4)) for _ in range(3)] == [
        2,
        2,
        1 - len(dropped),
    ] and scheduler.is_exhausted
    assert said in caplog.text and len(caplog.records) == len(dropped)


def test_a_broken_filter_ends_the_batch_which_is_played_again(runner):
    def divide(group):
        return 1 / (number(group.task) - 2) > 0

    scheduler = make(runner, Agent(), keep=GroupFilter("mine:divide", divide))
    with pytest.raises(RolloutError, match=r"group_filter mine:divide raised ZeroDivisionError.*train/A/2"):
        scheduler.get_batch(8)
    assert scheduler.state_dict()["next_index"] == 0 and scheduler.num_episodes == 0


def test_a_greedy_sibling_is_played_beside_each_group_and_not_among_it(runner):
    agent = Agent(reward=lambda task, sibling: float(sibling))
    groups = make(runner, agent, has_greedy_sibling=True).get_batch(4)
    for group in groups:
        assert [t.sibling for t in group.trajectories] == [0, 1]
        assert (group.greedy.sibling, group.greedy.score) == (2, 2.0)
        assert group.greedy.turns[0].is_greedy and not any(t.turns[0].is_greedy for t in group.trajectories)
        assert len(group.samples) == 2 and not any(sample.num_trained for sample in group.greedy.samples)
    assert make(runner, Agent()).get_batch(2)[0].greedy is None


def test_a_greedy_sibling_is_tried_again_and_its_group_replaced_when_it_fails(runner):
    def fails(task, sibling, attempt):
        return ValueError("bad") if sibling == 2 and (number(task) == 1 or attempt == 1) else None

    agent = Agent(fails)
    scheduler = make(runner, agent, has_greedy_sibling=True, max_failed_fraction=0.5)
    assert [g.index for g in scheduler.get_batch(8)] == [0, 2, 3, 4]
    [lost] = scheduler.rejected
    assert lost.rejected == "failed" and lost.greedy.status == "failed" and agent.attempts[0, 2] == 2


def test_what_was_finished_is_there_when_something_ends_a_batch(runner):
    agent = Agent(fails=lambda task, sibling, attempt: ConfigError("stop") if number(task) == 4 else None)
    scheduler = make(runner, agent, max_concurrent_groups=1)
    with pytest.raises(ConfigError):
        scheduler.get_batch(20)
    assert [g.index for g in scheduler.finished] == [0, 1, 2, 3]


def test_a_position_in_a_file_is_no_position_in_the_tasks(runner):
    with pytest.raises(CheckpointError, match="--from-rollouts"):
        make(runner, Agent()).load_state_dict({"num_episodes": 4, "replayed_sha256": "0"})


ROWS = RowTasks(
    1, "val", [DataRow("data", "single_turn_agent", {"prompt": word}) for word in "abc"], num_epochs=1
)


@pytest.mark.parametrize(("fraction", "bad"), [(0.5, "ab"), (1.0, "abc")])
def test_the_share_of_failures_is_of_the_episodes_that_are_played(runner, fraction, bad):
    """There are three rows, and places for 128; a validation of which nothing is left measures nothing."""
    agent = Agent(fails=lambda task, *_: ValueError("no key") if task.payload["prompt"] in bad else None)
    scheduler = make(runner, agent, tasks=ROWS, is_fixed=True, group_size=1, max_failed_fraction=fraction)
    assert scheduler.num_trajectories(128) == 3
    with pytest.raises(
        RolloutError, match=rf"(?s){len(bad)} episodes .*of 3 .*allows .{len(bad) - 1}.*ValueError: no key"
    ):
        scheduler.get_batch(128)
    agent = Agent(fails=lambda task, *_: ValueError("no key") if task.payload["prompt"] in bad[1:] else None)
    scheduler = make(runner, agent, tasks=ROWS, is_fixed=True, group_size=1, max_failed_fraction=fraction)
    assert [t.status for g in scheduler.get_batch(128) for t in g.trajectories].count("failed") == len(
        bad
    ) - 1


def test_a_share_that_binary_rounds_down_allows_as_many_failures_as_it_says(runner):
    agent = Agent(fails=lambda task, *_: ValueError("no key") if number(task) < 29 else None)
    scheduler = make(runner, agent, is_fixed=True, group_size=1, max_env_retries=0, max_failed_fraction=0.29)
    groups = scheduler.get_batch(100)
    assert [t.status for g in groups for t in g.trajectories].count("failed") == 29


def test_a_fault_of_a_reward_is_not_blamed_on_the_environment(runner):
    async def score(group):
        for trajectory in group.trajectories:
            trajectory.status, trajectory.error = "failed", "data.reward odd_rewards:judge: it returned None"
        return group.trajectories

    scheduler = make(runner, Agent())
    scheduler.score = score
    with pytest.raises(
        RolloutError, match=r"\nFix data.reward odd_rewards:judge, or raise max_failed_fraction of its"
    ):
        scheduler.get_batch(4)
