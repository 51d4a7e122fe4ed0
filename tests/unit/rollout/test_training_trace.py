"""OpenEnv's TrainingTrace: what goes out comes in again as it was, other programs' traces become
trajectories, and damage is said by file, line and turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import mentions

from turnwise.batching.samples import build_samples
from turnwise.cli.main import main
from turnwise.rollout.journal import read_groups, write_group
from turnwise.rollout.record import read_record
from turnwise.rollout.record_check import check_record
from turnwise.types import Group, Task, Trajectory, Turn, VersionRun

TASK = Task("train/A/0", "A", "train", 5, payload={"question": "√2?"})


def turn(number: int, **changes: Any) -> Turn:
    rng = np.random.default_rng(number)
    values: dict[str, Any] = {
        "prompt_ids": rng.integers(0, 100, size=6),
        "response_ids": rng.integers(0, 100, size=3),
        "logprobs": -rng.random(size=3).astype(np.float32),
        "versions": (VersionRun(2, 1), VersionRun(3, 2)),
        "text": "\u2192 Up",
        "observation": "P √",
        "action": "Up",
        "reward": 0.25,
        "state_key": (1, b"door"),
        "starts_context": number == 0,
    }
    return Turn(**values | changes)


def groups() -> list[Group]:
    """A branch, a second context, untrained turns, a failure in front and one at the end, and a rejected
    group with a greedy baseline."""
    branched = Trajectory(
        TASK,
        0,
        [
            turn(0),
            turn(1, logprobs=np.array([-3.4e-5, -1e-8, -120.5], np.float32)),
            turn(2, parent=0, is_trained=False),
            turn(3, starts_context=True, parent=1),
            turn(4, logprobs=np.array([-0.5, 1e-6, 0.0], np.float32)),
        ],
        status="truncated",
        limit="max_steps",
        outcome_rewards={"judge": 0.5},
        metrics={"success": 1.0},
    )
    failed = Trajectory(TASK, 1, status="failed", error="it broke")
    plain = Trajectory(TASK, 2, [turn(0)])
    greedy = Trajectory(TASK, 3, [turn(0, is_greedy=True)])
    return [
        Group(TASK, [failed, branched, plain], 0),
        Group(TASK, [plain, failed], 1, greedy=greedy, rejected="filtered"),
        Group(TASK, [plain, failed], 2),
    ]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(line + "\n" for group in groups() for line in write_group(4, group)))
    return path


def convert(source: Path, target: Path, *options: str) -> int:
    return main(["convert", str(source), str(target), *options])


def traces_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_out_and_in_again_is_the_same_file(rollouts: Path, tmp_path: Path) -> None:
    traces, back = tmp_path / "traces.json", tmp_path / "back.jsonl"
    assert convert(rollouts, traces) == 0 and convert(traces, back) == 0
    assert back.read_bytes() == rollouts.read_bytes()
    for before, after in zip(read_groups(rollouts).groups, read_groups(back).groups, strict=True):
        for played, read in zip(before.trajectories, after.trajectories, strict=True):
            for sample, again in zip(played.samples, read.samples, strict=True):
                assert sample.token_ids.tobytes() == again.token_ids.tobytes()
                assert sample.rollout_logprobs.tobytes() == again.rollout_logprobs.tobytes()
                assert sample.response_mask.tobytes() == again.response_mask.tobytes()


def test_a_turn_has_its_whole_prompt_and_what_is_not_trained_has_mask_0(
    rollouts: Path, tmp_path: Path
) -> None:
    traces = tmp_path / "traces.json"
    convert(rollouts, traces)
    branched, plain, rejected, baseline, last = traces_of(traces)
    assert [t["node_id"] for t in branched["turns"]] == [f"train/A/0/0/{n}" for n in range(5)]
    ids = [t["prompt_token_ids"] + t["completion_token_ids"] for t in branched["turns"]]
    assert ids[1][: len(ids[0])] == ids[2][: len(ids[0])] == ids[0] and ids[4][: len(ids[3])] == ids[3]
    assert [len(t["prompt_token_ids"]) for t in branched["turns"]] == [6, 15, 15, 6, 15]
    trained = [sum(t["loss_mask"]) for t in branched["turns"]]
    assert trained == [3, 3, 0, 3, 3] and sum(plain["turns"][0]["loss_mask"]) == 3
    for trace in (rejected, baseline):
        assert not any(trace["turns"][0]["loss_mask"])
    for turn in branched["turns"]:
        assert len(turn["loss_mask"]) == len(turn["prompt_token_ids"]) + 3
        assert all(logprob <= 0 for logprob in turn["per_token_logps"])
    assert sum(t["metadata"]["reward"] for t in branched["turns"]) == 5 * 0.25 + 0.5
    assert last["turns"][0]["metadata"]["group"] == "4/2"


def foreign(rollouts: Path, tmp_path: Path, change: Any = lambda number, turn: None) -> Path:
    """The traces as another program writes them: without our metadata."""
    ours, path = tmp_path / "ours.json", tmp_path / "foreign.json"
    ours.unlink(missing_ok=True)
    convert(rollouts, ours)
    traces = [trace for trace in traces_of(ours) if any(trace["turns"][0]["loss_mask"])]
    for number, trace in enumerate(traces):
        for turn in trace["turns"]:
            del turn["metadata"]["turnwise"]
            change(number, turn)
    path.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    return path


def test_contexts_of_another_program_are_found_by_their_tokens(rollouts: Path, tmp_path: Path) -> None:
    back = tmp_path / "back.jsonl"
    assert convert(foreign(rollouts, tmp_path), back) == 0
    first, second = read_groups(back).groups
    assert [len(first.trajectories), len(second.trajectories)] == [2, 1]
    [branched, _] = first.trajectories
    assert [t.starts_context for t in branched.turns] == [True, False, False, True, False]
    assert [t.parent for t in branched.turns] == [None, None, 0, None, None]
    assert [t.is_trained for t in branched.turns] == [True, True, False, True, True]
    assert branched.score == 5 * 0.25 + 0.5 and branched.turns[0].text == "\u2192 Up"
    expected = build_samples(groups()[0].trajectories[1])
    for sample, again in zip(expected, branched.samples, strict=True):
        assert sample.token_ids.tolist() == again.token_ids.tolist()
        assert sample.response_mask.tolist() == again.response_mask.tolist()


def test_groups_and_rewards_may_come_from_the_command_line(rollouts: Path, tmp_path: Path) -> None:
    def bare(number: int, turn: dict[str, Any]) -> None:
        turn["metadata"].clear()

    path = foreign(rollouts, tmp_path, bare)
    rewards = tmp_path / "rewards.txt"
    rewards.write_text("1\n0.5\n-2\n")
    back = tmp_path / "back.jsonl"
    assert convert(path, back, "--rewards", str(rewards)) == 2
    assert convert(path, back, "--group-size", "2") == 2
    assert convert(path, back, "--group-size", "2", "--rewards", str(rewards)) == 0
    scores = [[t.score for t in group.trajectories] for group in read_groups(back).groups]
    assert scores == [[1.0, 0.5], [-2.0]]


def damaged(key: str, value: Any) -> Any:
    def change(number: int, turn: dict[str, Any]) -> None:
        if number == 1:
            turn[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (damaged("per_token_logps", []), ("line 2", "train/A/0/2/0", "log-prob")),
        (damaged("per_token_logps", [0.0, float("nan"), 0.0]), ("line 2", "per_token_logps")),
        (damaged("loss_mask", [0] * 6 + [1, 0, 1]), ("line 2", "train/A/0/2/0", "2 of 3")),
        (damaged("loss_mask", [1] * 9), ("line 2", "prompt")),
        (damaged("loss_mask", [0]), ("line 2", "loss_mask")),
        (damaged("prompt_token_ids", [-1] * 6), ("line 2", "prompt_token_ids")),
        (damaged("completion_token_ids", "text"), ("line 2", "completion_token_ids")),
        (damaged("metadata", {}), ("line 2", "metadata.group", "--group-size")),
        (damaged("metadata", {"group": 1}), ("line 2", "metadata.reward", "--rewards")),
        (damaged("metadata", {"group": 1, "reward": "much"}), ("line 2", "metadata.reward", "much")),
    ],
)
def test_damage_is_said_by_line_and_turn(
    rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, keys: tuple[str, ...]
) -> None:
    path = foreign(rollouts, tmp_path, change)
    capsys.readouterr()
    assert convert(path, tmp_path / "back.jsonl") == 2
    assert mentions(capsys.readouterr().err, str(path), *keys) and not (tmp_path / "back.jsonl").exists()


def test_our_own_fields_are_checked_as_well(
    rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = tmp_path / "traces.json"
    convert(rollouts, traces)
    changes: list[tuple[Any, tuple[str, ...]]] = [
        (lambda turn: turn["prompt_token_ids"].__setitem__(14, "x"), ("prompt_token_ids",)),
        (lambda turn: turn["metadata"]["turnwise"]["turn"].update(logprobs=["x"] * 3), ("logprobs",)),
        (lambda turn: turn["metadata"]["turnwise"]["turn"].update(versions=[[2, 1]]), ("versions",)),
        (lambda turn: turn["metadata"]["turnwise"].clear(), ("metadata.turnwise",)),
    ]
    for number, (change, keys) in enumerate(changes):
        first = traces_of(traces)[0]
        change(first["turns"][1])
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(first))
        capsys.readouterr()
        assert convert(path, tmp_path / "back.jsonl") == 2
        assert mentions(capsys.readouterr().err, str(path), "line 1", *keys)


@pytest.mark.parametrize(
    "damage",
    [
        {"prompt_ids": [1.5]},
        {"prompt_ids": [True]},
        {"prompt_ids": None},
        {"response_ids": [1, 2, 2**31]},
        {"response_ids": [1, 2]},
        {"logprobs": ["x", -1.0, -1.0]},
        {"logprobs": [-1.0]},
        {"versions": [[2, 2]]},
        {"versions": [[2, 1.5], [3, 1.5]]},
        {"versions": 3},
        {"kept_ids": [[1], [2], [3]]},
        {"sampling": {"temperature": 0.0, "max_new_tokens": 4}},
        {"reward": "much"},
        {},
    ],
)
def test_a_record_is_refused_as_its_line_is(damage: dict[str, Any]) -> None:
    [line] = write_group(0, Group(TASK, [Trajectory(TASK, 0, [turn(0)])], 0))
    record = json.loads(line)
    record["turns"][0] |= damage
    faults = []
    for check in (lambda: read_record(json.dumps(record)), lambda: check_record(record)):
        try:
            check()
            faults.append("")
        except ValueError as fault:
            faults.append(str(fault))
    assert faults[0] == faults[1] and bool(faults[0]) == bool(damage)


def test_another_version_doubled_names_and_half_a_file_are_refused(
    rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = foreign(rollouts, tmp_path).read_text()
    doubled = json.loads(text.splitlines()[0])
    doubled["turns"][1]["node_id"] = doubled["turns"][0]["node_id"]
    cases = {
        text.replace('"schema_version": 1', '"schema_version": 2'): ("line 1", "schema_version", "2"),
        json.dumps(doubled): ("line 1", "turn 1", "node_id", "train/A/0/0/0"),
        text[:-40]: ("line 3", "cut"),
        "[1]\n": ("line 1", "turns"),
        "": ("empty",),
    }
    for number, (content, keys) in enumerate(cases.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(content)
        assert convert(path, tmp_path / "back.jsonl") == 2
        assert mentions(capsys.readouterr().err, str(path), *keys)
    assert convert(tmp_path / "none.json", tmp_path / "back.jsonl") == 2
    assert convert(rollouts, rollouts) == 2
    assert convert(rollouts, tmp_path / "traces.json", "--group-size", "2") == 2
