"""Success rates counted by hand."""

from __future__ import annotations

from turnwise.pipelines.evaluate import evaluate, success_table
from turnwise.types import Group, Task, Trajectory, Turn


def group(tag, successes, failed=0):
    task = Task(id=tag, tag=tag, split="val", seed=0)
    trajectories = [Trajectory(task=task, sibling=i, metrics={"success": float(s)}) for i, s in enumerate(successes)]
    trajectories += [Trajectory(task=task, sibling=9, status="failed", error="boom") for _ in range(failed)]
    return Group(task=task, trajectories=trajectories)


def test_overall_and_by_tag():
    evaluation = evaluate([group("A", [1, 1, 0]), group("B", [0], failed=2)])
    assert (evaluation.overall.num_successes, evaluation.overall.num_episodes, evaluation.num_failed) == (2, 4, 2)
    assert evaluation.by_tag["A"].success == 2 / 3 and evaluation.by_tag["B"].success == 0
    assert evaluation.overall.low < 0.5 < evaluation.overall.high
    assert evaluation.to_json()["by_tag"]["A"]["num_successes"] == 2


def test_without_a_success_metric_a_positive_score_counts():
    task = Task(id="t", tag="A", split="val", seed=0)
    turns = [Turn(prompt_ids=[], response_ids=[], logprobs=[], reward=0.5)]
    won, lost = Trajectory(task=task, sibling=0, turns=turns), Trajectory(task=task, sibling=1)
    assert evaluate([Group(task=task, trajectories=[won, lost])]).overall.success == 0.5


def test_table_has_a_row_a_player():
    rows = [(name, evaluate([group("A", [1, 0])]).overall) for name in ("random player", "after RL")]
    lines = success_table(rows).splitlines()
    assert len(lines) == 4 and "0.500" in lines[2] and lines[3].startswith("after RL")
