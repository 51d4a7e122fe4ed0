"""What is written to rollouts.jsonl gives the same samples back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from turnwise.batching.samples import build_samples
from turnwise.errors import DataError
from turnwise.rollout.journal import Journal, read_group, read_journal, write_group
from turnwise.types import Group, SamplingParams, Task, Trajectory, Turn, VersionRun


def trajectory():
    task = Task(id="train/A/0", tag="A", split="train", seed=5, payload={"question": "√2?"})
    rng = np.random.default_rng(0)
    turns = [
        Turn(
            prompt_ids=rng.integers(0, 100, size=6),
            response_ids=rng.integers(0, 100, size=3),
            logprobs=rng.normal(size=3).astype(np.float32),
            versions=(VersionRun(2, 1), VersionRun(3, 2)),
            text="<answer>Up</answer>",
            observation="P √",
            action="Up",
            reward=0.25,
            metrics={"success": 1.0},
            starts_context=i == 0,
        )
        for i in range(2)
    ]
    made = Trajectory(
        task=task,
        sibling=1,
        turns=turns,
        status="truncated",
        limit="max_steps",
        outcome_rewards={"judge": 0.5},
    )
    made.samples = build_samples(made)
    return made


@pytest.fixture
def written(tmp_path):
    """Writes groups and returns the file."""

    def write(*groups, step=0):
        path = tmp_path / "rollouts.jsonl"
        path.unlink(missing_ok=True)
        journal = Journal(path)
        journal.append(step, groups)
        journal.close()
        return path

    return write


def test_a_trajectory_can_be_trained_on_again(written):
    original = trajectory()
    [(step, read)] = read_journal(written(Group(original.task, [original], index=3), step=7))
    assert step == 7 and read.task == original.task and read.score == original.score == 1.0
    [before], [after] = original.samples, build_samples(read)
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    np.testing.assert_array_equal(before.rollout_logprobs, after.rollout_logprobs)
    np.testing.assert_array_equal(before.response_mask, after.response_mask)
    assert before.versions == after.versions and before.turn_spans == after.turn_spans


def test_advantages_are_written_per_turn(written):
    original = trajectory()
    [sample] = original.samples
    sample.advantages = np.zeros(sample.num_tokens, np.float32)
    first, second = sample.turn_spans
    sample.advantages[first.start : first.stop] = 0.5
    sample.advantages[second.start : second.stop] = [1, 2, 3]
    turns = json.loads(written(Group(original.task, [original])).read_text())["turns"]
    assert [turn["advantage"] for turn in turns] == [0.5, [1.0, 2.0, 3.0]]


def test_a_cut_line_is_named(written):
    original = trajectory()
    path = written(Group(original.task, [original, original]))
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DataError, match="line 2"):
        read_journal(path)


def test_what_belongs_to_a_group_is_written_with_it(written):
    original, greedy = trajectory(), trajectory()
    original.score_kl_penalty = 0.125
    original.error = "FileNotFoundError: caf\udce9"
    path = written(
        Group(original.task, [original], 3, greedy), Group(original.task, [original], 4, rejected="filtered")
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["group"], row["group_length"], row["rejected"], row["is_baseline"]) for row in rows] == [
        (3, 2, None, False),
        (3, 2, None, True),
        (4, 1, "filtered", False),
    ]
    [(_, read), *_] = read_journal(path)
    assert read.score_kl_penalty == 0.125 and read.error == "FileNotFoundError: caf?"


def test_text_that_is_no_unicode_survives_a_checkpoint():
    failed = trajectory()
    failed.error = failed.turns[0].observation = "caf\udce9"
    [read] = read_group(json.loads(json.dumps(write_group(0, Group(failed.task, [failed]))))).trajectories
    assert read.error == read.turns[0].observation == "caf?"


class Door:
    """A key that equals keys of the same content and whose `repr` shows nothing."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Door) and self.number == other.number

    def __hash__(self):
        return self.number


def buckets(keys):
    seen = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def test_state_keys_come_back_equal_where_they_were(written):
    keys = ["a", "1", 1, np.int64(2), 0.5, None, (1, ("door", b"\x00"))]
    keys += [Door(1), Door(2), Door(1), frozenset("ab"), (3, Door(2))]
    original = trajectory()
    turn = original.turns[0]
    original.turns = [replace(turn, state_key=key) for key in keys]
    for _ in range(2):
        [(_, original)] = read_journal(written(Group(original.task, [original])))
        back = [turn.state_key for turn in original.turns]
        assert back[:6] == keys[:6] and buckets(back) == buckets(keys), "what is read can be written again"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"logprobs": [0.0]}, r"turns\[1\]: 3 sampled tokens, but 1 log-probs and versions of 3"),
        ({"versions": [[0, 1]]}, r"turns\[1\]: 3 sampled tokens, but 3 log-probs and versions of 1"),
        ({"versions": [[0], [1, 2]]}, r"turns\[1\]\.versions\[0\]"),
        ({"response_ids": "abc"}, r"turns\[1\]\.response_ids: input should be a valid array \(got 'abc'\)"),
        ({"prompt_ids": [-1]}, r"turns\[1\]\.prompt_ids\[0\]: .*\(got -1\)"),
        ({"reward": "1"}, r"turns\[1\]\.reward: input should be a valid number \(got '1'\)"),
        ({"reward": float("nan")}, r"turns\[1\]\.reward: .*finite"),
        ({"observation": None}, r"turns\[1\]\.observation"),
        ({"metrics": [1]}, r"turns\[1\]\.metrics"),
        (
            {"finish_reason": "odd"},
            r"turns\[1\]\.finish_reason: .*'stop', 'length' or 'aborted' \(got 'odd'\)",
        ),
    ],
)
def test_a_turn_with_a_wrong_field_is_named_with_line_and_field(written, change, fault):
    original = trajectory()
    path = written(Group(original.task, [original]))
    record = json.loads(path.read_text())
    record["turns"][1] |= change
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=f"line 1: .*{fault}"):
        read_journal(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        read_journal(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"name the rollouts\.jsonl in it"):
        read_journal(tmp_path)


def test_what_a_turn_was_sampled_with_comes_back_without_its_seed():
    original = trajectory()
    hot = SamplingParams(9, temperature=1.3, top_k=20, stop_token_ids=(2,), stop_strings=("x",), seed=2**60)
    original.turns[0].sampling, original.turns[1].sampling = hot, SamplingParams(9, seed=5)
    lines = write_group(0, Group(original.task, [original]))
    read = read_group(lines, temperature=1.0)
    assert [turn.sampling for turn in read.trajectories[0].turns] == [
        replace(hot, stop_token_ids=(), seed=0),
        SamplingParams(9),
    ]
    assert write_group(0, read) == lines
    [sample], [first, second] = read.samples, read.samples[0].turn_spans
    assert set(sample.temperatures[first.start : first.stop]) == {np.float32(1.3)}
    assert not sample.temperatures[second.start :].any()
    assert read_group(lines).samples[0].temperatures is None
    with pytest.raises(ValueError, match=r"sampling\.temperature: it is 0, and a sampled turn's is above 0"):
        read_group([lines[0].replace('"temperature":1.3', '"temperature":0')])


def test_kept_ids_come_back_with_their_tokens():
    original = trajectory()
    first = original.turns[0]
    first.kept_ids = np.array([*first.response_ids[[0, 2]], 7], np.int32)
    first.kept_offsets = np.array([0, 1, 1, 3])
    lines = write_group(0, Group(original.task, [original]))
    [sample] = read_group(lines).samples
    start = first.num_tokens - 3
    assert sample.kept_ids.dtype == np.int32 and sample.kept_ids.tolist() == first.kept_ids.tolist()
    assert sample.kept_offsets.tolist() == [0] * (start + 1) + [1, 1, 3] + [3] * 9
    with pytest.raises(ValueError, match="each sampled token needs a list that is empty or holds the token"):
        read_group([lines[0].replace(f'"kept_ids":[[{first.response_ids[0]}]', '"kept_ids":[[101]')])
