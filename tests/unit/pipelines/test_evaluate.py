"""Success rates counted by hand, pass@k against every choice of samples, and intervals against what they
promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from messages import mentions

from turnwise.pipelines.collect import Collection
from turnwise.pipelines.evaluate import Score, evaluate, pass_at_k, score_table, success_table
from turnwise.report.intervals import clustered_interval, wilson_interval
from turnwise.rollout.failures import Failures
from turnwise.rollout.measure import rollout_metrics, validation_metrics
from turnwise.types import Group, Task, Trajectory, Turn


def group(tag, successes, failed=0):
    task = Task(id=tag, tag=tag, split="val", seed=0)
    trajectories = [
        Trajectory(task=task, sibling=i, metrics={"success": float(s)}) for i, s in enumerate(successes)
    ]
    trajectories += [
        Trajectory(task=task, sibling=9 + i, status="failed", error="boom") for i in range(failed)
    ]
    return Group(task=task, trajectories=trajectories)


def test_overall_and_by_tag():
    evaluation = evaluate([group("A", [1, 1, 0]), group("B", [0], failed=2)])
    assert (evaluation.overall.num_successes, evaluation.overall.num_episodes, evaluation.num_failed) == (
        2,
        4,
        2,
    )
    assert evaluation.by_tag["A"].success == 2 / 3 and evaluation.by_tag["B"].success == 0
    assert evaluation.overall.low < 0.5 < evaluation.overall.high
    assert evaluation.to_json()["by_tag"]["A"]["num_successes"] == 2


def test_a_task_of_which_all_episodes_failed_is_not_scored():
    evaluation = evaluate([group("A", [1]), group("B", [], failed=2)])
    assert (evaluation.overall.num_tasks, evaluation.overall.success, evaluation.num_failed) == (1, 1.0, 2)
    assert list(evaluation.by_tag) == ["A"]
    assert str(evaluation).endswith("\nnot counted: 2 episodes that failed outside the policy")
    assert "not counted" not in str(evaluate([group("A", [1])]))
    assert evaluate([group("B", [], failed=1)]).overall.num_episodes == 0


def test_without_a_success_metric_a_positive_score_counts():
    task = Task(id="t", tag="A", split="val", seed=0)
    turns = [Turn(prompt_ids=[], response_ids=[1, 2], logprobs=[], reward=0.5)]
    won, lost = (
        Trajectory(task=task, sibling=0, turns=turns),
        Trajectory(task=task, sibling=1, status="truncated"),
    )
    overall = evaluate([Group(task=task, trajectories=[won, lost])]).overall
    assert (overall.success, overall.mean_score) == (0.5, 0.25)
    assert (overall.mean_turns, overall.mean_tokens, overall.truncated) == (0.5, 1.0, 0.5)


class Played:
    """What is left of a scheduler after it has played a batch."""

    def __init__(self, finished, rejected):
        self.finished, self.rejected = finished, rejected

    def get_batch(self, num_trajectories):
        return self.finished


def test_an_episode_of_several_trajectories_is_one_episode(tmp_path):
    whole, failed = group("A", [1, 0]), group("A", [], failed=1)
    turn = Turn(np.array([0]), np.array([1, 2]), np.zeros(2, np.float32))
    for each in (whole, failed):
        each.trajectories = [
            replace(part, weight=1 / 3, turns=[turn]) for part in each.trajectories for _ in range(3)
        ]
    evaluation = evaluate([whole, failed])
    assert (evaluation.overall.num_episodes, evaluation.overall.mean_turns, evaluation.num_failed) == (
        2,
        3.0,
        1,
    )
    assert list(evaluation.overall.pass_at) == [1, 2]
    assert {m.name: m.value for m in validation_metrics([whole, failed])}["val/num_episodes"] == 2
    failures = Failures()
    failures.begin(num_episodes=2, max_fraction=0.5, needs_success=False)
    failures.add(failed.trajectories)
    lost, filtered = replace(failed, rejected="failed"), replace(whole, rejected="filtered")
    measured = {m.name: m.value for m in rollout_metrics([], [lost, filtered])}
    assert [measured[f"rollout/{name}"] for name in ("failed", "rejected", "filtered")] == [1, 1, 2]
    for part in whole.trajectories:
        part.status, part.limit = "truncated", "max_steps"
    collection = Collection(tmp_path / "rollouts.jsonl")
    collection.play(Played([whole], [lost]), num_batches=1, num_trajectories=2)
    summary = collection.summary()
    assert (summary["num_failed"], summary["failures"], summary["limits"]) == (
        1,
        {"boom": 1},
        {"max_steps": 2},
    )


def test_table_has_a_row_a_player():
    rows = [(name, evaluate([group("A", [1, 0])]).overall) for name in ("random player", "after RL")]
    lines = success_table(rows).splitlines()
    assert len(lines) == 4 and "0.500" in lines[2] and lines[3].startswith("after RL")


def test_a_table_of_scores_leaves_out_what_a_row_has_not():
    rows = [
        ("sampled", evaluate([group("A", [1, 0, 0])]).overall),
        ("greedy", evaluate([group("A", [1])]).overall),
    ]
    header, rule, first, second = score_table(rows).splitlines()
    assert "pass@2   pass@3" in header and len(rule) == len(header) == len(first) == len(second)
    assert "0.667    1.000" in first and "1.000" in second and "0.667" not in second


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6), (7, 2)])
def test_pass_at_k_is_the_share_of_choices_with_a_success(n, c):
    samples = [1] * c + [0] * (n - c)
    for k in range(1, n + 1):
        choices = list(combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_pass_at_k_is_a_mean_over_tasks_for_powers_of_two_and_all_samples():
    groups = [group("A", [1, 0, 0, 0, 0, 0]), group("A", [0] * 6), group("A", [1, 1, 1], failed=3)]
    overall = evaluate(groups).overall
    assert list(overall.pass_at) == [1, 2, 4, 6]
    assert overall.pass_at[1] == pytest.approx((1 / 6 + 0 + 1) / 3)
    assert overall.pass_at[4] == pytest.approx((pass_at_k(6, 1, 4) + 0) / 2), (
        "three samples can't say what four would do"
    )
    assert evaluate([group("A", [1]), group("A", [0])]).overall.pass_at == {}


def test_pass_at_k_says_how_many_tasks_had_enough_samples():
    groups = [group("A", [1] * 4), group("A", [1] * 4), group("A", [0], failed=3), group("A", [0], failed=3)]
    evaluation = evaluate(groups)
    assert evaluation.overall.pass_at == {1: 0.5, 2: 1.0, 4: 1.0}
    assert evaluation.to_json()["overall"]["pass_at_tasks"] == {1: 4, 2: 2, 4: 2}
    assert mentions(str(evaluation), "pass@4", "2 of 4") and "pass@1:" not in str(evaluation)
    assert "tasks" not in str(evaluate(groups[:2])), "all tasks have enough"


def test_one_episode_a_task_has_the_wilson_interval():
    score = Score.count([(i < 30, 0.0) for i in range(100)])
    assert (score.low, score.high) == pytest.approx(wilson_interval(30, 100))


def test_the_interval_covers_the_truth_where_samples_of_a_task_are_alike():
    """600 evaluations of 60 tasks × 8 samples whose tasks differ a lot: counting samples as independent
    covers far less."""
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(600):
        successes = rng.binomial(8, rng.beta(0.5, 0.5, size=60)).tolist()
        low, high = clustered_interval(successes, [8] * 60)
        covered += low <= 0.5 <= high
        low, high = wilson_interval(sum(successes), 480)
        naive += low <= 0.5 <= high
    assert 0.92 <= covered / 600 <= 0.98 and naive / 600 < 0.7


@pytest.mark.parametrize("rate", [0, 8])
def test_tasks_that_all_end_alike_count_once_each(rate):
    assert clustered_interval([rate] * 20, [8] * 20) == pytest.approx(wilson_interval(20 * (rate > 0), 20))


def test_a_success_outside_0_and_1_has_an_interval():
    assert wilson_interval(16, 8) == wilson_interval(8, 8) and wilson_interval(-4, 8) == wilson_interval(0, 8)


def test_metrics_that_are_to_be_shown_are_means_over_the_episodes_that_report_them():
    some = group("A", [1, 0, 0])
    for trajectory, kept in zip(some.trajectories[:2], (1.0, 0.5), strict=True):
        trajectory.metrics["kept"] = kept
    rows = [("here", evaluate([some]).overall), ("elsewhere", evaluate([group("A", [1, 1, 1])]).overall)]
    assert rows[0][1].metrics["kept"] == 0.75 and "kept" not in rows[1][1].metrics
    header, _, first, second = score_table(rows, ["kept"]).splitlines()
    assert header.endswith("   kept") and first.endswith("  0.750")
    assert len(header) == len(first) == len(second) and second.endswith("      ")
    assert "kept" not in score_table(rows)
