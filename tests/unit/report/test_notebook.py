"""Trajectories and groups as text and as HTML."""

from __future__ import annotations

import numpy as np

import turnwise.report.view.notebook  # noqa: F401  # registers the renderer
from turnwise.types import Group, Sample, Task, Trajectory, Turn, TurnSpan


def trajectory() -> Trajectory:
    turn = Turn(
        np.array([1]),
        np.array([7, 8]),
        np.array([-0.5, -2.0], np.float32),
        text="<b>go",
        observation="A & B",
        reward=0.5,
    )
    return Trajectory(Task("train/Lake/1", "Lake", "train", 3), 0, [turn], outcome_rewards={"judge": 0.25})


def test_text_has_status_score_and_turns():
    assert str(trajectory()) == (
        "train/Lake/1, sibling 0: score 0.75 (judge 0.25), 1 turn, finished\n  turn 1: '<b>go' → reward "
        "0.5, 2 tokens"
    )
    assert str(Group(trajectory().task, [trajectory()])).startswith(
        "group 0, 1 trajectories\n  train/Lake/1, sibling 0"
    )


def test_html_is_escaped_and_colours_by_logprob_or_advantage():
    plain = trajectory()
    page = plain._repr_html_()
    assert "&lt;b&gt;go" in page and "A &amp; B" in page and "<b>go" not in page and "<script" not in page
    assert "user: A &amp; B" in page, "a turn that was read from a file has only its observation"
    image = [{"type": "image", "image": None}, {"type": "text", "text": "Where?"}]
    said = [
        ("system", "Rules"),
        ("user", "first"),
        ("assistant", "middle"),
        ("user", image),
        ("assistant", "<b>go"),
    ]
    plain.turns[0].messages = [{"role": role, "content": content} for role, content in said]
    plain.turns[0].messages.insert(0, {"role": "assistant", "tool_calls": []})  # an example without content
    page = plain._repr_html_()
    assert (
        "system: Rules\nuser: first\nassistant: middle\nuser: [image]Where?" in page
        and page.count("&lt;b&gt;go") == 1
    )
    assert "log-prob -2.00" in page and "advantage" not in page
    mask = np.array([False, True, True])
    sample = Sample(np.array([1, 7, 8]), mask, np.zeros(3, np.float32), (TurnSpan(0, 1, 3),))
    sample.advantages = np.array([0.0, 1.0, -1.0], np.float32)
    plain.samples = [sample]
    page = Group(plain.task, [plain])._repr_html_()
    assert "advantage 1'" in page and "rgba(40,170,80,1.00)" in page and "rgba(255,60,60,1.00)" in page
