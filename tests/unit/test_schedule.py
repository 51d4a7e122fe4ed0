"""What is written is what is followed."""

from __future__ import annotations

import pytest

from turnwise.errors import DataError
from turnwise.schedule import Schedule, Taken

A, B = ("a", 0), ("b", 1)


@pytest.fixture
def file(tmp_path):
    schedule = Schedule(tmp_path / "schedule.jsonl")
    schedule.updated(0)
    schedule.stepped((A, B))
    schedule.stepped(())
    schedule.took(0, Taken([[1, 0]], []))
    schedule.stepped(())
    schedule.updated(1)
    schedule.stepped((A,))
    schedule.close()
    return tmp_path / "schedule.jsonl"


def test_a_record_says_what_comes_next(file):
    schedule = Schedule(recorded=file)
    assert schedule.is_followed and schedule.admissions is None and schedule.update == 0
    schedule.updated(0)
    for admissions in ((A, B), (), ()):
        assert schedule.admissions == admissions and schedule.update is None
        schedule.stepped(admissions)
    assert schedule.update == 1
    schedule.updated(1)
    assert schedule.admissions == (A,)
    schedule.stepped((A,))
    assert schedule.batch(0) == ([[1, 0]], [])


def test_the_end_of_a_record_is_said(file):
    schedule = Schedule(recorded=file)
    for admissions in ((), (A, B), (), (), (), (A,)):
        schedule.stepped(admissions) if schedule.admissions is not None else schedule.updated(schedule.update)
    assert schedule.admissions is None
    with pytest.raises(DataError, match="ends after 1 batches, where its run was ended"):
        assert schedule.update
    with pytest.raises(DataError, match="ends after 1 batches"):
        schedule.batch(1)


def test_what_follows_a_record_writes_the_same(file, tmp_path):
    again = Schedule(tmp_path / "again.jsonl", recorded=file)
    again.updated(0)
    for admissions in ((A, B), (), ()):
        again.stepped(admissions)
    again.took(0, Taken([[1, 0]], []))
    again.updated(1)
    again.stepped((A,))
    again.close()
    engine, ours = (
        [line for line in f.read_text().splitlines() if "batch" not in line] for f in (file, tmp_path / "again.jsonl")
    )
    assert engine == ours


def test_a_batch_that_came_in_parts_is_followed_in_these_parts(tmp_path):
    schedule = Schedule(tmp_path / "schedule.jsonl")
    taken = [Taken([[3], [0, 2], []], [4]), Taken([[1]], []), Taken([[]], [5, 6])]
    for step, batch in enumerate(taken):
        schedule.took(step, batch)
    schedule.close()
    again = Schedule(recorded=tmp_path / "schedule.jsonl")
    assert [again.batch(step) for step in range(3)] == taken


def test_files_that_hold_no_record_are_refused(tmp_path, file):
    with pytest.raises(DataError, match="holds no schedule to replay"):
        Schedule(recorded=tmp_path / "missing.jsonl")
    schedule = Schedule(file)
    schedule.resumed()
    schedule.close()
    with pytest.raises(DataError, match="was resumed"):
        Schedule(recorded=file)


def test_a_record_is_followed_only_by_what_computes_alike(tmp_path):
    recorded, kernels = tmp_path / "schedule.jsonl", {"engine": "own kernels", "threads": 2}
    schedule = Schedule(recorded)
    schedule.begin(kernels)
    schedule.updated(0)
    schedule.close()
    again = Schedule(recorded=recorded)
    again.begin(kernels)
    assert again.update == 0
    with pytest.raises(DataError, match=r"with threads 2, and here it is 1\. .*OMP_NUM_THREADS, TURNWISE_KERNELS"):
        Schedule(recorded=recorded).begin(kernels | {"threads": 1})


def test_a_validation_that_the_record_does_not_hold_whole_is_its_end(tmp_path):
    recorded = tmp_path / "schedule.jsonl"
    schedule = Schedule(recorded)
    schedule.begin({"threads": 2})
    for step in range(2):
        schedule.begin_validation()
        if step == 0:
            schedule.validated()
            schedule.took(0, Taken([[0]], []))
    schedule.close()
    again = Schedule(recorded=recorded)
    again.begin_validation()
    again.took(0, Taken([[0]], []))
    with pytest.raises(DataError, match="no whole validation after 1 batches: its run was ended there, or had another"):
        again.begin_validation()


def test_a_record_from_before_there_were_conditions_is_followed_without(file):
    schedule = Schedule(recorded=file)
    schedule.begin({"threads": 2})
    schedule.begin_validation()
    assert schedule.update == 0
