"""What a run records for `turnwise view`: messages and tools always, values of tokens and validation episodes
on request, without a change of what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_runs import assert_same_weights, folder_of_run as run, small_config, training

from turnwise.rollout.journal import read_journal, write_group
from turnwise.types import Group, Task, Trajectory, Turn, VersionRun


def make_config(tiny_model, folder, **changes):
    changes = {"max_steps": 2, "actor_train": training(1e-2)} | changes
    return small_config(tiny_model, folder, **changes)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    return run(make_config(tiny_model, tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory):
    values = {"record_token_values": ["old", "ref", "entropy"], "record_validation": True, "eval_steps": 1}
    return run(make_config(tiny_model, tmp_path_factory.mktemp("recorded"), val_batch_size=4, **values))


def test_each_turn_has_its_new_messages(plain):
    for line in lines_of(plain.rollouts):
        for turn in line["turns"]:
            *shown, reply = turn["messages"]
            assert reply["role"] == "assistant" and reply["content"] == turn["text"]
            assert shown[-1] == {"role": "user", "content": turn["observation"]}
            assert (shown[0]["role"] == "system") == turn["starts_context"]
            assert "token_values" not in turn and "tools" not in turn


def test_values_of_tokens_are_those_of_the_models(recorded):
    for line in lines_of(recorded.rollouts):
        for turn in line["turns"]:
            values = turn["token_values"]
            assert {len(of_tokens) for of_tokens in values.values()} == {len(turn["response_ids"])}
            assert values["old"] == pytest.approx(turn["logprobs"], rel=0.01, abs=1e-3)
            assert min(values["entropy"]) >= 0
            if line["step"] == 0:
                assert values["ref"] == values["old"], "the policy hasn't left the reference yet"
    last = lines_of(recorded.rollouts)[-1]["turns"][0]["token_values"]
    assert last["ref"] != last["old"]


def test_recording_changes_nothing_that_is_trained(plain, recorded):
    assert_same_weights(*(folder.path / "checkpoints" / "checkpoint-2" for folder in (plain, recorded)))
    assert not plain.val_rollouts.exists()


def test_validation_episodes_have_their_own_file(recorded):
    steps = [line["step"] for line in lines_of(recorded.val_rollouts)]
    assert sorted(set(steps)) == [0, 1, 2] and len(steps) == 12
    assert {line["task"]["split"] for line in lines_of(recorded.val_rollouts)} == {"val"}


def test_messages_and_tools_come_back_and_pictures_stay_out(tmp_path):
    picture = {"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}
    called = {"name": "f", "arguments": {"x": object()}}
    messages = [
        {"role": "user", "content": [picture, {"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": called}]},
    ]
    tools = ({"type": "function", "function": {"name": "f"}},)
    turn = Turn(np.array([1]), np.array([2]), np.zeros(1, np.float32), (VersionRun(0, 1),))
    turn.starts_context = True
    turn.messages = messages
    turn.tools = tools
    turn.token_values = {"entropy": np.array([1.23456], np.float32)}
    group = Group(Task("train/A/0", "A", "train", 1), [])
    group.trajectories.append(Trajectory(group.task, 0, [turn], comments={"judge/words": "Fine."}))
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(line + "\n" for line in write_group(0, group)))
    [(_, read)] = read_journal(file)
    assert read.comments == {"judge/words": "Fine."}
    again = read.turns[0]
    assert again.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Where?"}]
    assert again.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": "object"}
    assert again.tools == tools and again.token_values["entropy"] == pytest.approx([1.23])
    old = json.loads(file.read_text())
    del old["comments"]
    for name in ("messages", "tools", "token_values"):
        del old["turns"][0][name]
    file.write_text(json.dumps(old) + "\n")
    [(_, older)] = read_journal(file)
    assert older.turns[0].messages == () and older.turns[0].tools == ()
