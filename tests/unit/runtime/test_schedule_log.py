"""What is written is what is followed."""

from __future__ import annotations

from contextlib import closing

import pytest

from turnwise.errors import DataError
from turnwise.runtime.schedule_log import BatchGroups, ScheduleLog

A, B = ("a", 0), ("b", 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "schedule_log.jsonl"


@pytest.fixture
def file(path):
    with closing(ScheduleLog(path)) as schedule_log:
        play(schedule_log)
    return path


def play(schedule_log):
    schedule_log.updated(0)
    schedule_log.stepped((A, B))
    schedule_log.stepped(())
    schedule_log.record_batch(0, BatchGroups([[1, 0]], []))
    schedule_log.stepped(())
    schedule_log.updated(1)
    schedule_log.stepped((A,))


def test_a_record_says_what_comes_next(file):
    schedule_log = ScheduleLog(recorded=file)
    assert schedule_log.is_followed and schedule_log.admissions is None and schedule_log.update == 0
    schedule_log.updated(0)
    for admissions in ((A, B), (), ()):
        assert schedule_log.admissions == admissions and schedule_log.update is None
        schedule_log.stepped(admissions)
    assert schedule_log.update == 1
    schedule_log.updated(1)
    assert schedule_log.admissions == (A,)
    schedule_log.stepped((A,))
    assert schedule_log.batch(0) == ([[1, 0]], [])


def test_the_end_of_a_record_is_said(file):
    schedule_log = ScheduleLog(recorded=file)
    for admissions in ((), (A, B), (), (), (), (A,)):
        schedule_log.stepped(admissions) if schedule_log.admissions is not None else schedule_log.updated(
            schedule_log.update
        )
    assert schedule_log.admissions is None
    with pytest.raises(DataError, match="ends after 1 batches, where its run ended"):
        assert schedule_log.update
    with pytest.raises(DataError, match="ends after 1 batches"):
        schedule_log.batch(1)


def test_what_follows_a_record_writes_the_same(file, tmp_path):
    with closing(ScheduleLog(tmp_path / "again.jsonl", recorded=file)) as again:
        play(again)
    engine, ours = (
        [line for line in f.read_text().splitlines() if "batch" not in line]
        for f in (file, tmp_path / "again.jsonl")
    )
    assert engine == ours


def test_a_batch_that_came_in_parts_is_followed_in_these_parts(path):
    batches = [BatchGroups([[3], [0, 2], []], [4]), BatchGroups([[1]], []), BatchGroups([[]], [5, 6])]
    with closing(ScheduleLog(path)) as schedule_log:
        for step, batch in enumerate(batches):
            schedule_log.record_batch(step, batch)
    again = ScheduleLog(recorded=path)
    assert [again.batch(step) for step in range(3)] == batches


def test_files_that_hold_no_record_are_refused(tmp_path, file):
    with pytest.raises(DataError, match="holds no schedule to replay"):
        ScheduleLog(recorded=tmp_path / "missing.jsonl")
    with closing(ScheduleLog(file)) as schedule_log:
        schedule_log.resumed()
    with pytest.raises(DataError, match="a resumed run"):
        ScheduleLog(recorded=file)


def test_a_record_is_followed_only_by_what_computes_alike(path):
    kernels = {"engine": "own kernels", "threads": 2}
    with closing(ScheduleLog(path)) as schedule_log:
        schedule_log.begin(kernels)
        schedule_log.updated(0)
    again = ScheduleLog(recorded=path)
    again.begin(kernels)
    assert again.update == 0
    with pytest.raises(
        DataError, match=r"with threads 2, and here it is 1\. .*OMP_NUM_THREADS, TURNWISE_KERNELS"
    ):
        ScheduleLog(recorded=path).begin(kernels | {"threads": 1})


def test_a_validation_that_the_record_does_not_hold_whole_is_its_end(path):
    with closing(ScheduleLog(path)) as schedule_log:
        schedule_log.begin({"threads": 2})
        schedule_log.begin_validation()
        schedule_log.validated()
        schedule_log.record_batch(0, BatchGroups([[0]], []))
        schedule_log.begin_validation()
    again = ScheduleLog(recorded=path)
    again.begin_validation()
    again.record_batch(0, BatchGroups([[0]], []))
    with pytest.raises(
        DataError, match="no complete validation after 1 batches: its run ended there, or had another"
    ):
        again.begin_validation()


def test_a_record_from_before_there_were_conditions_is_followed_without(file):
    schedule_log = ScheduleLog(recorded=file)
    schedule_log.begin({"threads": 2})
    schedule_log.begin_validation()
    assert schedule_log.update == 0


def test_versions_of_tasks_are_known_up_to_the_last_admitted_group(path):
    with closing(ScheduleLog(path)) as schedule_log:
        for index, version in enumerate((0, 0, 1, 3)):
            schedule_log.admitted(index, version)
    again = ScheduleLog(recorded=path)
    assert [again.task_version(index) for index in range(5)] == [0, 0, 1, 3, None]
