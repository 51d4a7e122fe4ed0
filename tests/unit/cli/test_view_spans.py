"""The spans of traces.jsonl in `turnwise view`: found by step and placed under turns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from viewed_run import HOSTILE, Writer, groups_of, write_traces

from turnwise.cli.view_spans import TraceSpans
from turnwise.report.view.episode_spans import ShownSpan, rows_of
from turnwise.report.view.step_data import step_data

TASK = "train/rows/2"


@pytest.fixture
def path(tmp_path) -> Path:
    return write_traces(tmp_path, num_steps=2)


def test_spans_are_those_of_the_step_and_the_episode(path):
    spans = TraceSpans(path).of_step(0, False)
    assert len(spans) == 14 and all(len(attempts) == 1 for attempts in spans.values())
    [attempt] = spans[TASK, 1]
    assert [span.name for span in attempt] == [
        *("chat", "server_wait", "execute_tool search"),
        *("chat", "server_wait", "execute_tool search"),
        "reward judge",
    ]
    assert [span.number for span in attempt] == [0, 0, 0, 1, 1, 1, None]
    assert [span.is_inner for span in attempt][:3] == [False, True, False]
    assert attempt[3].start_s == pytest.approx(0.15) and attempt[3].seconds == pytest.approx(0.1)
    assert "sampled" in attempt[0].text and "result" in attempt[2].text
    [failed] = spans["train/hostile/4", 0]
    assert failed[-1].is_error and HOSTILE in failed[-1].text
    traces = TraceSpans(path)
    assert traces.of_step(7, False) == {} and traces.of_step(0, True) == {}


def test_the_file_may_grow_rotate_and_be_damaged(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    traces = TraceSpans(path)
    assert len(traces.of_step(0, False)) == 2, "the third line has no end yet"
    path.write_bytes(b"".join(lines[:3]))
    assert len(traces.of_step(0, False)) == 3
    os.replace(path, path.with_name("traces.1.jsonl"))
    odd = json.loads(lines[3])
    odd["spans"][1]["attributes"] = {}
    damaged = [b"no json\n", b"{}\n", b'{"tags":{"step":0}}\n', json.dumps(odd).encode() + b"\n"]
    path.write_bytes(b"".join(damaged) + lines[4])
    assert len(traces.of_step(0, False)) == 4, "three of the earlier part, and one"


def test_a_tag_may_hold_anything(tmp_path, path):
    content = json.loads(path.read_bytes().splitlines()[0])
    content["tags"]["task"] = 'a","spans":[b'
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    assert list(TraceSpans(odd).of_step(0, False)) == [('a","spans":[b', 0)]


def test_a_run_without_traces_has_none(tmp_path):
    assert TraceSpans(tmp_path / "traces.jsonl").of_step(0, False) == {}


def said(number: int, *response_ids: int) -> ShownSpan:
    return ShownSpan("chat", float(number), 1.0, number, response_ids=list(response_ids))


def test_each_trajectory_of_a_run_has_the_spans_of_its_own_turns():
    attempt = [said(0, 5), said(1, 6), ShownSpan("step", 1.5, 0.1, 1), said(2, 7), ShownSpan("reward", 3, 1)]
    rows = rows_of([attempt], [{"response_ids": [6]}, {"response_ids": [7]}])
    assert [(row[0], row[2]) for row in rows] == [(0, "chat"), (0, "step"), (1, "chat"), (None, "reward")]


def test_of_several_attempts_the_one_with_these_turns_is_shown():
    failed, played = [said(0, 9)], [said(0, 5), said(1, 5)]
    turns = [{"response_ids": [5]}, {"response_ids": [5]}]
    assert [row[3] for row in rows_of([failed, played], turns)] == [0.0, 1.0]
    assert rows_of([failed], turns) == [], "the trace of another attempt says nothing of this one"
    error = [ShownSpan("invoke_agent", 0, 1, text="error: no place", is_error=True)]
    assert rows_of([error], [])[0][5:] == ["error: no place", 1], (
        "an episode that failed before its first turn"
    )


def test_a_step_of_the_pages_has_them(path):
    groups = groups_of(Writer(), 0)
    task = {"id": groups[2].task.id}
    turns = [{"response_ids": turn.response_ids.tolist()} for turn in groups[2].trajectories[0].turns]
    records = [
        {"step": 0, "group": 2, "task": task, "turns": turns, "sibling": sibling} for sibling in (0, 5)
    ]
    made = step_data(0, records, None, spans=TraceSpans(path).of_step(0, False))
    first, other = made.data["groups"][0]["members"]
    assert [row[0] for row in first["spans"]] == [0, 0, 0, 1, 1, 1, None] and "spans" not in other
