"""Tasks are a pure function of their index, and no two share their randomness."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from turnwise.rollout.tasks import CurriculumTasks, DataRow, RowTasks, SeededTasks, sibling_sampling
from turnwise.types import Group, SamplingParams, Trajectory


def source(split="train", run_seed=3):
    return SeededTasks(run_seed=run_seed, split=split, tags=("A", "B"), partition=(3, 1))


def test_partition_is_kept_in_every_round():
    assert [source().task(i).tag for i in range(8)] == ["A", "A", "B", "A"] * 2


def test_a_short_batch_meets_every_tag():
    even = SeededTasks(run_seed=0, split="val", tags=("A", "B", "C"), partition=(256, 256, 256))
    assert sorted([even.task(i).tag for i in range(6)]) == ["A", "A", "B", "B", "C", "C"]


def test_seeds_differ_between_tasks_splits_and_runs():
    seeds = {
        source(split, seed).task(i).seed for split in ("train", "val") for seed in (3, 4) for i in range(500)
    }
    assert len(seeds) == 2000


def test_siblings_have_their_own_token_seeds_and_keep_the_rest():
    sampling = SamplingParams(max_new_tokens=7, temperature=0.5, stop_strings=("x",))
    task = source().task(0)
    made = [sibling_sampling(sampling, task, s) for s in range(8)]
    assert len({m.seed for m in made}) == 8
    assert {(m.max_new_tokens, m.temperature, m.stop_strings) for m in made} == {(7, 0.5, ("x",))}


def rows(number: int) -> list[DataRow]:
    return [DataRow("data", "single_turn_agent", {"prompt": str(index)}) for index in range(number)]


def test_every_row_comes_once_an_epoch_in_an_order_of_its_own():
    tasks = RowTasks(3, "train", rows(50), num_epochs=2)
    epochs = [[tasks.task(epoch * 50 + index).row for index in range(50)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50)) and epochs[0] != epochs[1] != list(
        range(50)
    )
    assert [RowTasks(3, "val", rows(5), shuffle=False).task(index).row for index in range(5)] == list(
        range(5)
    )
    assert tasks.num_tasks == 100 and len({tasks.task(index).seed for index in range(100)}) == 100


@pytest.mark.parametrize(("num_rows", "num_tasks"), [(1, 2), (3, 4), (4, 6), (6, 8)])
def test_a_mixture_ends_with_its_rows(num_rows, num_tasks):
    mixed = SeededTasks(
        3,
        "train",
        ("A", "data"),
        (1, 3),
        rows=RowTasks(3, "train", rows(num_rows), num_epochs=1),
        rows_tag="data",
    )
    assert mixed.num_tasks == num_tasks
    played = [mixed.task(index) for index in range(num_tasks)]
    assert sorted(task.row for task in played if task.row is not None) == list(range(num_rows))
    assert len({task.id for task in played}) == num_tasks


def test_rows_without_a_share_end_nothing():
    mixed = SeededTasks(
        3, "train", ("A", "data"), (2, 0), rows=RowTasks(3, "train", rows(3), num_epochs=1), rows_tag="data"
    )
    assert mixed.num_tasks is None and {mixed.task(index).tag for index in range(10)} == {"A"}


def solved(task, share):
    return Group(
        task, [Trajectory(task, s, outcome_rewards={"right": float(s < 8 * share)}) for s in range(8)]
    )


def test_a_curriculum_prefers_what_half_of_the_siblings_solve():
    tasks = CurriculumTasks(3, "train", ("data",), {}, RowTasks(3, "train", rows(3)), "data")
    shares = (0.0, 0.5, 1.0)
    for _ in range(30):
        tasks.observe(
            [solved(RowTasks(3, "train", rows(3)).of_row(row, 0, 0), shares[row]) for row in range(3)]
        )
    assert tasks.weight("row 1") == 1.0
    assert (
        tasks.weight("row 0")
        == pytest.approx(tasks.weight("row 2"))
        == pytest.approx(0.1 + 0.9 * 4 * (1 / 12) * (11 / 12), abs=0.02)
    )
    drawn = Counter(tasks.task(index).row for index in range(3000))
    wanted = [tasks.weight(f"row {row}") for row in range(3)]
    for row in range(3):
        assert drawn[row] / 3000 == pytest.approx(wanted[row] / sum(wanted), abs=0.03)


def test_a_task_of_an_older_version_is_what_it_was():
    tasks = CurriculumTasks(3, "train", ("A", "B"), {"A": "env_agent"}, num_versions=2)
    before = [tasks.task(index) for index in range(40)]
    tasks.observe([solved(task, 1.0) for task in before if task.tag == "A"])
    assert (
        [tasks.task(index, version=0) for index in range(40)]
        == before
        != [tasks.task(index) for index in range(40)]
    )
    again = CurriculumTasks(3, "train", ("A", "B"), {"A": "env_agent"}, num_versions=2)
    again.load_state_dict(json.loads(json.dumps(tasks.state_dict())))
    assert again.version == 1 and [again.task(index, 0) for index in range(40)] == before
    assert [again.task(index) for index in range(40)] == [tasks.task(index) for index in range(40)]
