"""The Chrome trace of a run, and the shares of a step's time."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from turnwise.runtime.event_loop import new_loop
from turnwise.runtime.stopwatch import ENGINE, ENVIRONMENTS, HELD, IDLE, LOOP, Stopwatch
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.timeline import MAX_LANES, Timeline


class Clocked(Timeline):
    """A timeline whose clock the test sets."""

    time_s = 100.0

    def now(self) -> float:
        return self.time_s

    def during(self, track: str, name: str, start: float, end: float, **details: object) -> None:
        self.time_s = end
        self.add(track, name, start, **details)


class KeptMetrics(list):
    """A tracker that keeps the metrics of each step."""

    def log(self, step, metrics, texts):
        self.append(metrics)


def events(timeline: Timeline, path: Path) -> tuple[list[dict], dict[int, str]]:
    """The spans, and the names of the rows."""
    timeline.close()
    found = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    return [event for event in found if event["ph"] == "X"], rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline.json"


def test_spans_have_their_track_time_and_facts(path: Path) -> None:
    timeline = Clocked(path)
    timeline.during(ENGINE, "step", 101.0, 101.5, batch_size=4)
    timeline.during("trainer", "forward", 102.0, 102.25)
    (step, forward), rows = events(timeline, path)
    assert rows == {step["tid"]: ENGINE, forward["tid"]: "trainer"}
    assert (step["ts"], step["dur"], step["args"]) == (1e6, 5e5, {"batch_size": 4})
    assert timeline.totals == {ENGINE: 0.5, "trainer": 0.25}


def test_short_calls_that_follow_each_other_are_one_block(path: Path) -> None:
    timeline = Clocked(path)
    for call in range(1000):
        timeline.during(ENVIRONMENTS, "Lake.step", 101 + call * 1e-4, 101 + call * 1e-4 + 2e-5)
    timeline.during(ENVIRONMENTS, "Lake.step", 103.0, 103.00001)
    timeline.during(ENVIRONMENTS, "Lake.step", 103.0001, 103.1)
    found, _ = events(timeline, path)
    assert [event["args"] for event in found] == [{"calls": 1000}, {}, {}]
    assert timeline.totals[ENVIRONMENTS] == pytest.approx(1000 * 2e-5 + 1e-5 + 0.0999)


def test_calls_at_the_same_time_get_rows_of_their_own(path: Path) -> None:
    timeline = Clocked(path)
    for number in range(MAX_LANES + 5):
        timeline.during("environments in threads", "Shop.step", 104 + number / 100, 106.0)
    timeline.during("environments in threads", "Shop.step", 107.0, 108.0)
    found, rows = events(timeline, path)
    assert [event["tid"] for event in found if event["ts"] == 7e6] == [1]
    assert len({event["tid"] for event in found}) == MAX_LANES
    assert any("5 more at the same time" in name for name in rows.values())


def test_the_file_is_bounded_and_the_sums_go_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Clocked(path, max_spans=3)
    for number in range(5):
        timeline.during(ENGINE, "step", 101.0 + number, 101.5 + number)
    found, _ = events(timeline, path)
    assert len(found) == 3 and timeline.num_dropped == 2 and "ends early" in caplog.text
    assert timeline.totals[ENGINE] == 2.5


def test_the_shares_of_a_step_add_up_to_one_and_start_anew_with_each(path: Path) -> None:
    kept, timeline = KeptMetrics(), Timeline(path)
    log = RunLog([kept], timeline)
    for step, (loop_s, engine_s, idle_s) in enumerate([(1e-9, 1e-9, 0.0), (1e-9, 0.0, 1e-9)]):
        with log.phase("total"):
            with log.phase("rollout"):
                for track, seconds in ((LOOP, loop_s), (ENGINE, engine_s), (IDLE, idle_s)):
                    timeline.totals[track] = timeline.totals.get(track, 0.0) + seconds
            with log.phase("train"):
                pass
        log.end_step(step)
    for metrics in kept:
        assert metrics["time/step_wall"] >= metrics["time/step_total"] > 0.0
        for who in ("trainer", "rollouts"):
            shares = [value for name, value in metrics.items() if name.startswith(f"time/{who}/")]
            assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0
    assert (
        kept[0]["time/rollouts/engine"]
        > kept[1]["time/rollouts/engine"]
        == 0.0
        < kept[1]["time/rollouts/waiting"]
    )


def test_what_was_spent_before_the_first_step_is_none_of_its_time(path: Path) -> None:
    kept, timeline = KeptMetrics(), Timeline(path)
    timeline.totals |= {LOOP: 1000.0, ENGINE: 600.0}
    log = RunLog([kept], timeline)
    with log.phase("rollout"):
        pass
    log.end_step(0)
    assert kept[0]["time/rollouts/engine"] == 0.0 and kept[0]["time/rollouts/paused"] == pytest.approx(1.0)


def test_a_loop_without_work_waits_for_episodes_or_is_held() -> None:
    stopwatch = Stopwatch()
    with asyncio.Runner(loop_factory=partial(new_loop, stopwatch)) as runner:
        runner.run(asyncio.sleep(0.2))
        assert set(stopwatch.totals) == {HELD}
        stopwatch.num_playing = 1
        runner.run(asyncio.sleep(0.2))
    assert set(stopwatch.totals) == {HELD, IDLE}
