"""The live view: what is on the screen, that it ends cleanly, and where it doesn't come up at all."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from drawn import plain
from rich.console import Console

from turnwise.tracking.live import MAX_SHOWN_LINES, LiveTracker, Screen, stdout_tracker
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS, SFT_COLUMNS
from turnwise.tracking.pace import Pace
from turnwise.tracking.terminal import TerminalTracker

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
STEP = {
    "rollout/score/mean": 0.75,
    "env/Lake/success": 0.5,
    "critic/kl": 0.0123,
    "actor/entropy": 0.4,
    "system/tps": 8677.2,
    "time/step_rollout": 1.0,
    "time/step_train": 2.0,
    "time/step_total": 3.0,
    "time/step_wall": 4.0,
}


def played(num_steps=8):
    """A screen after three steps of four seconds each."""
    screen = Screen("lake", AGENTIC_COLUMNS, Pace(num_steps))
    screen.pace.begin_phase("val", 100.0)
    for step, success in enumerate((0.25, 0.875, 0.5)):
        screen.log(step, STEP | {"val/env/Lake/success": success}, 104.0 + 4.0 * step)
    return screen


def test_the_screen_shows_step_time_left_phases_and_figures():
    screen = played()
    screen.pace.begin_phase("old_log_probs_values", 112.0)
    text = plain(screen.render(113.5))
    first, now, *lines = text.splitlines()
    # Five steps of 4 s are to come, and 1.5 s of the first of them are over.
    assert "lake  step 3/8" in first and "38%" in first and first.endswith("0:18 left")
    assert now.split() == ["now", "old", "log", "probs", "values", "1.5", "s"]
    assert "score     0.750" in text and "success   0.500" in text
    assert "first 0.250  best 0.875 after 1 step" in text
    assert "kl 0.0123" in text and "tok/s 8,677" in text
    assert lines[-1].endswith("rollout 25%  train 50%")
    assert not any("total" in line for line in lines)


@pytest.mark.parametrize(
    ("num_done", "phase", "before", "end", "left"),
    [(0, "val", "time left unknown", 10.0, "1:10"), (6, "rollout", "step 6/8", 5.0, "0:05")],
)
def test_time_left_counts_validations_and_what_a_resumed_run_has_still_to_do(
    num_done, phase, before, end, left
):
    screen = Screen("lake", AGENTIC_COLUMNS, Pace(8, num_done=num_done))
    screen.pace.begin_phase(phase, 0.0)
    assert before in plain(screen.render(1.0))
    screen.log(num_done, STEP, end)
    assert f"{left} left" in plain(screen.render(end))


def test_the_end_says_how_it_ended():
    finished, stopped = played(num_steps=3), played()
    for screen in (finished, stopped):
        screen.close(112.0)
    assert "done      after 0:12" in plain(finished.render(999.0))
    assert "stopped   after 0:12" in plain(stopped.render(999.0))
    assert "left" not in plain(stopped.render(999.0))


def test_the_loss_of_fine_tuning_is_best_where_it_is_lowest():
    screen = Screen("lake", SFT_COLUMNS, Pace(4))
    for step, loss in enumerate((3.0, 1.0, 2.0)):
        screen.log(step, {"sft/loss": loss, "sft/val_loss": loss}, float(step))
    assert "best 1.0000 after 1 step" in plain(screen.render(9.0))


def test_a_sample_is_short_and_commands_no_terminal():
    screen = played()
    screen.show("\n".join(["best \x1b[2J", *("a line" for _ in range(50))]))
    lines = plain(screen.render(112.0)).splitlines()
    assert "best \\x1b[2J" in lines
    assert lines.count("a line") == MAX_SHOWN_LINES - 1
    assert len(lines) <= 20


def test_the_view_is_drawn_and_gives_the_cursor_back():
    out = io.StringIO()
    tracker = LiveTracker(
        Screen("lake", AGENTIC_COLUMNS, Pace(8)), Console(file=out, force_terminal=True, width=100)
    )
    tracker.begin_phase("rollout")
    tracker.log(0, STEP)
    tracker.close()
    tracker.close()
    tracker.begin_phase("rollout")
    text = out.getvalue()
    assert "score" in text and "step 1/8" in text
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR)


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("file", "term", "expected"),
    [
        (FakeTerminal(), "xterm", LiveTracker),
        (FakeTerminal(), "dumb", TerminalTracker),
        (io.StringIO(), "xterm", TerminalTracker),
    ],
)
def test_plain_lines_where_there_is_no_terminal(file, term, expected, monkeypatch):
    # Colours asked for in a pipe are no reason to move a cursor there.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", term)
    assert (
        type(stdout_tracker("lake", AGENTIC_COLUMNS, Pace(8), every=1, console=Console(file=file)))
        is expected
    )


SCRIPT = """
import logging
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS
from turnwise.tracking.live import stdout_tracker
from turnwise.tracking.pace import Pace
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.terminal import TerminalHandler
from turnwise.types import Metric

log = logging.getLogger("turnwise")
log.addHandler(TerminalHandler())
run = RunLog([stdout_tracker("lake", AGENTIC_COLUMNS, Pace(8), every=1)])
with run.phase("rollout"):
    log.warning("an episode was lost")
run.add([Metric("rollout/score/mean", 0.75)])
run.end_step(0)
raise ValueError("nobody closed the view")
"""


def test_in_a_terminal_warnings_stand_whole_and_an_error_leaves_a_cursor():
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}
    )
    os.close(slave)
    chunks = []
    with suppress(OSError):  # Linux says that the other end is closed by an error.
        while chunk := os.read(master, 65536):
            chunks.append(chunk)
    assert process.wait() == 1
    os.close(master)
    text = b"".join(chunks).decode()
    assert "an episode was lost" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).splitlines()
    assert "step 1/8" in text and "ValueError: nobody closed the view" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
