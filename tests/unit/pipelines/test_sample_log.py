"""The readable sample: complete where it is short, honest about what it leaves out where it is long."""

from __future__ import annotations

import logging

import numpy as np

from turnwise.pipelines.sample_log import MAX_TEXT, MAX_TURNS, describe_trajectory, log_samples, summary
from turnwise.types import Group, Sample, Task, Trajectory, Turn, TurnSpan

TASK = Task(id="train/Lake/0", tag="Lake", split="train", seed=7)


def decode(ids):
    return "".join(chr(i) for i in ids)


def turn(text, observation="P _\n_ G", action="Right", reward=0.0, prompt="<system>walk\n<user>P _\n_ G"):
    ids = np.array([ord(c) for c in prompt])
    return Turn(
        ids,
        np.arange(2),
        np.zeros(2, np.float32),
        text=text,
        observation=observation,
        action=action,
        reward=reward,
    )


def trajectory(*turns, **changes):
    return Trajectory(TASK, 0, list(turns), **changes)


def test_an_episode_reads_from_its_first_prompt_to_its_last_reward():
    episode = trajectory(
        turn("<go> Right\n"), turn("?", "_ P\n_ G", None, 1.0), status="truncated", limit="max_steps"
    )
    sample = Sample(
        np.arange(6), np.array([0, 1, 1, 0, 1, 1], bool), np.zeros(6), (TurnSpan(0, 1, 3), TurnSpan(1, 4, 6))
    )
    sample.advantages = np.array([0, 0.5, 0.7, 9, -1, -1], np.float32)
    episode.samples = [sample]
    assert describe_trajectory(episode, decode).splitlines() == [
        "train/Lake/0, sibling 0: score 1, 2 turns, truncated by max_steps",
        "    | <system>walk",
        "    | <user>P _",
        "    | _ G",
        "  turn 1",
        r"    → '<go> Right\n'",
        "      action 'Right'; reward 0, advantage +0.600",
        "  turn 2",
        "    | _ P",
        "    | _ G",
        "    → '?'",
        "      no action could be parsed; reward 1, advantage -1.000",
    ]


def test_long_episodes_and_texts_are_cut_and_counted():
    text = "x" * (MAX_TEXT + 500)
    written = describe_trajectory(trajectory(*(turn(text, observation=text) for _ in range(40))), decode)
    assert f"{40 - MAX_TURNS + 1} turns are left out" in written
    assert "  turn 1\n" in written and "  turn 40\n" in written
    assert "… 500 more characters" in written
    assert len(written) < 2 * (MAX_TURNS + 1) * (MAX_TEXT + 200)


def test_the_best_and_the_worst_are_logged_and_the_best_is_handed_back(caplog):
    groups = [Group(TASK, [trajectory(turn(f"t{reward}", reward=reward)) for reward in (0.5, 2.0, -1.0)])]
    with caplog.at_level(logging.INFO):
        shown, whole = log_samples(4, groups, decode)
    best, worst = (record.getMessage() for record in caplog.records)
    assert "step 5, best trajectory" in best and "'t2.0'" in best
    assert whole == f"{best}\n{worst}"
    assert "step 5, worst trajectory" in worst and "'t-1.0'" in worst
    assert shown.startswith("best episode of step 5: train/Lake/0") and "P _ / _ G → 't2.0'  +2" in shown
    assert log_samples(4, [Group(TASK, [trajectory(status="failed")])], decode) == ("", "")


def test_a_summary_has_one_line_a_turn_and_an_end():
    lines = summary(trajectory(*(turn(str(i)) for i in range(9)))).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["'0'", "'1'", "'2'", "turns", "'7'", "'8'"]
    assert "… 4 turns" in lines[4]
