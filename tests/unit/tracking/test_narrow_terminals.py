"""The live view where the terminal is narrow."""

from __future__ import annotations

import io
import re

import pytest
from drawn import plain
from rich.console import Console

from turnwise.protocols import StepTexts
from turnwise.tracking.live import LiveTracker, Screen
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS
from turnwise.tracking.pace import Pace

STEP = {
    "rollout/score/mean": 0.75,
    "env/Lake/success": 0.5,
    "rollout/num_turns": 3.5,
    "actor/entropy": 0.4,
    "actor_train/grad_norm": 0.25,
    "actor/lr": 1e-4,
    "system/tps": 8677.2,
    "time/step_rollout": 1.0,
    "time/step_train": 2.0,
}
VALIDATION = {"val/env/Lake/success": 0.5, "time/step_val": 9.0}


def lines_of(width):
    """The last frame of a run on a terminal of that width."""
    out = io.StringIO()
    screen = Screen("an_experiment_with_a_long_name", AGENTIC_COLUMNS, Pace(200))
    tracker = LiveTracker(screen, Console(file=out, force_terminal=True, width=width))
    tracker.begin_phase("rollout")
    for step in range(2):
        tracker.log(step, STEP | VALIDATION)
    tracker._live.refresh()
    frame = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).rpartition("\r")[2]
    tracker.close()
    return frame.splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 70, 120])
def test_the_time_left_stands_on_every_terminal(width):
    first, *others = lines_of(width)
    assert first.startswith("an_experiment"[: 8 if width < 50 else 13]) and "step 2/200" in first
    assert re.search(r"0:\d\d left$", first.rstrip())
    assert max(map(len, [first, *others])) <= width


def test_a_header_without_room_is_cut_to_one_line():
    first, second, *_ = lines_of(20)
    assert first.startswith("step 2/200  1%") and first.rstrip().endswith("…") and second.startswith("now")


@pytest.mark.parametrize("width", [50, 70, 120])
def test_no_figure_is_cut_off(width):
    lines = lines_of(width)
    text = " ".join(" ".join(lines).split())
    for figure in (
        "turns 3.5",
        "entropy 0.400",
        "grad 0.25",
        "lr 1.0e-04",
        "tok/s 8,677",
        "best 0.500 after 0 steps",
        "val 75%",
    ):
        assert figure in text
    assert max(map(len, lines)) <= width and "…" not in text


def test_the_phases_stay_those_of_a_step_when_the_end_is_validated():
    screen = Screen("lake", AGENTIC_COLUMNS, Pace(1))
    screen.pace.begin_phase("rollout", 0.0)
    screen.log(0, STEP, 4.0)
    screen.log(1, VALIDATION, 13.0)
    screen.close(13.0)
    text = plain(screen.render(13.0))
    assert "time      4.0 s  rollout 25%  train 50%" in text
    assert "val       0.500" in text


class ReflowingTerminal(io.StringIO):
    """What a terminal shows that wraps its lines anew when it becomes narrower, as most do; enough of it for
    rich."""

    def __init__(self, width):
        super().__init__()
        self.width, self.lines, self.row = width, [""], 0

    def write(self, text):
        for code, up, character in re.findall(r"(\x1b\[(\d*)A|\x1b\[[0-9;?]*[a-zA-Z])|(.|\n)", text):
            self._take(code, up, character)
        return len(text)

    def _take(self, code, up, character):
        if code.endswith("A"):
            self.row -= int(up or 1)
        elif code == "\x1b[2K":
            self.lines[self.row] = ""
        elif character == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")
        elif character and character != "\r":
            self.lines[self.row] += character

    def resize(self, width):
        """Every line that was written whole is wrapped at the new width; the cursor stays at the end of what
        it was on."""
        wrapped = [[line[i : i + width] for i in range(0, max(len(line), 1), width)] for line in self.lines]
        self.row = sum(map(len, wrapped[: self.row + 1])) - 1
        self.lines = [part for parts in wrapped for part in parts]
        self.width = width

    @property
    def shown(self):
        return [line for line in self.lines if line]


@pytest.mark.parametrize("widths", [(120, 50), (120, 90, 60), (60, 120, 60)])
def test_resizing_leaves_one_frame(widths):
    terminal = ReflowingTerminal(widths[0])
    console = Console(file=terminal, force_terminal=True, width=widths[0])
    tracker = LiveTracker(Screen("lake", AGENTIC_COLUMNS, Pace(200)), console)
    print("what was there before", file=terminal)
    tracker.begin_phase("rollout")
    tracker.log(0, STEP | VALIDATION, StepTexts(brief="best episode\n" + "a long line of a sample " * 10))
    tracker._live.refresh()
    for width in widths[1:]:
        terminal.resize(width)
        console.width = width
        tracker._live.refresh()
    tracker.close()
    assert terminal.shown[0] == "what was there before"
    assert sum("step 1/200" in line for line in terminal.shown) == 1
    assert sum(line.startswith("score") for line in terminal.shown) == 1
    assert sum(line.startswith("best episode") for line in terminal.shown) == 1
