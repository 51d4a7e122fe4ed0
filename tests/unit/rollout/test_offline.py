"""Rollouts read back from a file: whole, cut, damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from turnwise.errors import CheckpointError, DataError, RolloutError
from turnwise.rollout.journal import Journal, read_groups
from turnwise.rollout.offline import OfflineRollouts
from turnwise.types import Group, Task, Trajectory, Turn, VersionRun


def episode(task, sibling, is_greedy=False):
    turn = Turn(
        prompt_ids=np.array([1, 2, 3]),
        response_ids=np.array([4 + sibling]),
        logprobs=np.array([-0.5], np.float32),
        versions=(VersionRun(0, 1),),
        reward=float(sibling),
        starts_context=True,
        is_greedy=is_greedy,
    )
    return Trajectory(task=task, sibling=sibling, turns=[turn])


def group(index, size=3, **changes):
    task = Task(id=f"train/A/{index}", tag="A", split="train", seed=index)
    return Group(task, [episode(task, sibling) for sibling in range(size)], index, **changes)


@pytest.fixture
def written(tmp_path):
    """Writes groups, two a step, and returns the file and its lines."""

    def write(*groups):
        path = tmp_path / "rollouts.jsonl"
        path.unlink(missing_ok=True)
        journal = Journal(path)
        for start in range(0, len(groups), 2):
            journal.append(start // 2, groups[start : start + 2])
        journal.close()
        return path, path.read_text().splitlines(keepends=True)

    return write


def test_groups_come_back_as_they_were_played(written):
    greedy = group(1)
    greedy.greedy = episode(greedy.task, 3, is_greedy=True)
    path, _ = written(group(0), greedy, group(2, rejected="filtered"))
    recording = read_groups(path)
    assert recording.lost == []
    assert [(g.index, len(g.trajectories)) for g in recording.groups] == [(0, 3), (1, 3), (2, 3)]
    assert [g.rejected for g in recording.groups] == [None, None, "filtered"]
    assert recording.groups[0].greedy is None and recording.groups[1].greedy.sibling == 3
    assert [(s.num_trained, s.versions) for s in recording.groups[1].samples] == [(1, ())] * 3
    assert recording.groups[1].trajectories[0].turns[0].versions, "they are written again"


@pytest.mark.parametrize(
    ("damage", "indices", "said"),
    [
        (
            lambda lines: [*lines[:-1], lines[-1][:50]],
            [0, 1],
            ["1 of 9 lines can't be read (invalid", "train/A/2 (2 of 3"],
        ),
        (lambda lines: lines[:-2], [0, 1], ["left out as incomplete: train/A/2 (1 of 3 trajectories)"]),
        (
            lambda lines: [lines[0], "what\n", *lines[2:]],
            [1, 2],
            ["1 of 9 lines can't be read", "train/A/0 (2 of 3"],
        ),
        (
            lambda lines: [*lines[:3], '{"step": 1}\n' * 5, *lines[8:]],
            [0],
            ["4, 5, 6 and 2 more lines", "train/A/2 (1 of 3"],
        ),
        (lambda lines: lines[1:6], [1], ["train/A/0 (2 of 3 trajectories)"]),
    ],
)
def test_the_good_part_of_a_damaged_file_is_used_and_the_rest_named(written, damage, indices, said):
    path, lines = written(group(0), group(1), group(2))
    path.write_text("".join(damage(lines)))
    recording = read_groups(path)
    assert [g.index for g in recording.groups] == indices
    for part in said:
        assert part in "; ".join(recording.lost)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"hello\n", "1 of 1 lines can't be read"),
        (b"\xff\xfe\n[]\n", "2 of 2 lines"),
        (None, "1 of 3"),
    ],
)
def test_a_file_without_a_whole_group_is_refused(written, content, said):
    path, lines = written(group(0))
    path.write_bytes(lines[0].encode() if content is None else content)
    with pytest.raises(DataError, match=f"holds no complete group.*{said}"):
        read_groups(path)


def test_a_context_that_starts_with_nothing_is_named(written):
    path, lines = written(group(0))
    records = [json.loads(line) for line in lines]
    records[1]["turns"][0]["prompt_ids"] = []
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match=r"train/A/0, sibling 1: .*without a prompt"):
        read_groups(path)


def test_a_replay_hands_out_each_group_once():
    offline = OfflineRollouts([group(i) for i in range(5)], 3, "a.jsonl", batch_size=6)
    assert offline.num_batches(6) == 2
    for indices, is_exhausted in (([0, 1], False), ([2, 3], True)):
        assert [g.index for g in offline.get_batch(6)] == indices and offline.is_exhausted == is_exhausted
    with pytest.raises(RolloutError, match=r"a\.jsonl is at its end: 1 groups are left"):
        offline.get_batch(6)


def test_a_position_belongs_to_its_file():
    offline, again = (
        OfflineRollouts([group(i) for i in range(4)], 3, "a.jsonl", batch_size=6) for _ in range(2)
    )
    offline.get_batch(6)
    again.load_state_dict(json.loads(json.dumps(offline.state_dict())))
    assert not again.is_exhausted and again.get_batch(6)[0].index == 2 and again.num_episodes == 12
    at_end = OfflineRollouts(again.groups, 3, "a.jsonl", batch_size=3)
    at_end.load_state_dict(again.state_dict())
    assert at_end.is_exhausted, "a run that is continued here ends, as the first one did"
    longer = OfflineRollouts([group(i) for i in range(6)], 3, "a.jsonl")
    longer.load_state_dict(offline.state_dict())
    assert longer.num_episodes == 6, "what lies behind the position may grow"
    for state in ({"next_index": 2, "num_episodes": 6}, offline.state_dict()):
        with pytest.raises(CheckpointError, match=r"wasn't saved by a run that trained from b\.jsonl"):
            OfflineRollouts([group(i + 1) for i in range(4)], 3, "b.jsonl").load_state_dict(state)
