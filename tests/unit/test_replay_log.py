"""What is written is what is followed."""

from __future__ import annotations

import pytest

from turnwise.errors import DataError
from turnwise.replay_log import ReplayLog, Taken

A, B = ("a", 0), ("b", 1)


@pytest.fixture
def file(tmp_path):
    replay_log = ReplayLog(tmp_path / "replay_log.jsonl")
    replay_log.updated(0)
    replay_log.stepped((A, B))
    replay_log.stepped(())
    replay_log.took(0, Taken([[1, 0]], []))
    replay_log.stepped(())
    replay_log.updated(1)
    replay_log.stepped((A,))
    replay_log.close()
    return tmp_path / "replay_log.jsonl"


def test_a_record_says_what_comes_next(file):
    replay_log = ReplayLog(recorded=file)
    assert replay_log.is_followed and replay_log.admissions is None and replay_log.update == 0
    replay_log.updated(0)
    for admissions in ((A, B), (), ()):
        assert replay_log.admissions == admissions and replay_log.update is None
        replay_log.stepped(admissions)
    assert replay_log.update == 1
    replay_log.updated(1)
    assert replay_log.admissions == (A,)
    replay_log.stepped((A,))
    assert replay_log.batch(0) == ([[1, 0]], [])


def test_the_end_of_a_record_is_said(file):
    replay_log = ReplayLog(recorded=file)
    for admissions in ((), (A, B), (), (), (), (A,)):
        replay_log.stepped(admissions) if replay_log.admissions is not None else replay_log.updated(replay_log.update)
    assert replay_log.admissions is None
    with pytest.raises(DataError, match="ends after 1 batches, where its run ended"):
        assert replay_log.update
    with pytest.raises(DataError, match="ends after 1 batches"):
        replay_log.batch(1)


def test_what_follows_a_record_writes_the_same(file, tmp_path):
    again = ReplayLog(tmp_path / "again.jsonl", recorded=file)
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
    replay_log = ReplayLog(tmp_path / "replay_log.jsonl")
    taken = [Taken([[3], [0, 2], []], [4]), Taken([[1]], []), Taken([[]], [5, 6])]
    for step, batch in enumerate(taken):
        replay_log.took(step, batch)
    replay_log.close()
    again = ReplayLog(recorded=tmp_path / "replay_log.jsonl")
    assert [again.batch(step) for step in range(3)] == taken


def test_files_that_hold_no_record_are_refused(tmp_path, file):
    with pytest.raises(DataError, match="holds no schedule to replay"):
        ReplayLog(recorded=tmp_path / "missing.jsonl")
    replay_log = ReplayLog(file)
    replay_log.resumed()
    replay_log.close()
    with pytest.raises(DataError, match="a resumed run"):
        ReplayLog(recorded=file)


def test_a_record_is_followed_only_by_what_computes_alike(tmp_path):
    recorded, kernels = tmp_path / "replay_log.jsonl", {"engine": "own kernels", "threads": 2}
    replay_log = ReplayLog(recorded)
    replay_log.begin(kernels)
    replay_log.updated(0)
    replay_log.close()
    again = ReplayLog(recorded=recorded)
    again.begin(kernels)
    assert again.update == 0
    with pytest.raises(DataError, match=r"with threads 2, and here it is 1\. .*OMP_NUM_THREADS, TURNWISE_KERNELS"):
        ReplayLog(recorded=recorded).begin(kernels | {"threads": 1})


def test_a_validation_that_the_record_does_not_hold_whole_is_its_end(tmp_path):
    recorded = tmp_path / "replay_log.jsonl"
    replay_log = ReplayLog(recorded)
    replay_log.begin({"threads": 2})
    for step in range(2):
        replay_log.begin_validation()
        if step == 0:
            replay_log.validated()
            replay_log.took(0, Taken([[0]], []))
    replay_log.close()
    again = ReplayLog(recorded=recorded)
    again.begin_validation()
    again.took(0, Taken([[0]], []))
    with pytest.raises(DataError, match="no complete validation after 1 batches: its run ended there, or had another"):
        again.begin_validation()


def test_a_record_from_before_there_were_conditions_is_followed_without(file):
    replay_log = ReplayLog(recorded=file)
    replay_log.begin({"threads": 2})
    replay_log.begin_validation()
    assert replay_log.update == 0


def test_versions_of_tasks_are_known_up_to_the_last_admitted_group(tmp_path):
    replay_log = ReplayLog(tmp_path / "replay_log.jsonl")
    for index, version in enumerate((0, 0, 1, 3)):
        replay_log.admitted(index, version)
    replay_log.close()
    again = ReplayLog(recorded=tmp_path / "replay_log.jsonl")
    assert [again.task_version(index) for index in range(5)] == [0, 0, 1, 3, None]
