"""Long phases say how far they are, a first estimate comes before the first step ends, and long steps come
with advice."""

from __future__ import annotations

import io
import re

import pytest
import yaml
from drawn import plain
from small_runs import write_demonstrations

from turnwise.cli.main import main
from turnwise.runtime.stopwatch import Stopwatch, Work
from turnwise.tracking.live import Screen
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS
from turnwise.tracking.pace import Pace
from turnwise.tracking.terminal import SILENCE_S, TerminalTracker

TAG = {"env_type": "toy_envs:LettersEnv", "max_steps": 2, "max_tokens_per_step": 16, "action_pattern": None}
TRAIN = {
    "max_steps": 2,
    "rollout_batch_size": 8,
    "eval_steps": 2,
    "val_batch_size": 4,
    "ppo_epochs": 2,
    "track_with": ["stdout"],
    "actor_train": {"training_args": {"per_device_train_batch_size": 2}},
    "train_env_manager": {"num_env_groups": 2, "group_size": 4},
    "val_env_manager": {"num_env_groups": 4, "group_size": 1},
    "custom_envs": {"Toy": TAG},
}


@pytest.fixture
def run(tiny_model, tmp_path, capsys, monkeypatch):
    """Runs a verb where nothing may be silent; returns what it writes to output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("turnwise.tracking.terminal.SILENCE_S", 0.0, raising=False)
    monkeypatch.setattr("turnwise.tracking.terminal._TICK_S", 0.001, raising=False)
    write_demonstrations(tmp_path / "rows.jsonl", 16)

    def call(verb, values, *arguments):
        (tmp_path / "toy.yaml").write_text(
            yaml.safe_dump({"pretrain": str(tiny_model), "sequence_length": 384, **values})
        )
        assert main([verb, "toy.yaml", *arguments]) == 0
        return capsys.readouterr()

    return call


def test_the_phases_of_training_say_how_far_they_are(run):
    out, err = run("train", TRAIN)
    assert "smaller sizes" not in err, "advice is for steps that take long"
    assert re.search(r"step 1/2: rollout [\d.]+ s  \d/8 episodes", out)
    assert re.search(r"step 1/2: rollout .* tokens, [\d,]+/s", out)
    assert re.search(r"step 1/2: val [\d.]+ s  \d/4 episodes", out)
    assert re.search(r"step \d/2: train [\d.]+ s  \d/8 micro-batches  [\d,]+ tokens", out), (
        "two passes of four optimiser steps"
    )
    assert re.search(r"step \d/2: old log probs values [\d.]+ s  \d/\d micro-batches", out)


def test_a_trainer_in_its_own_process_says_so_too(run):
    out = run(
        "train",
        {**TRAIN, "async_generation_ratio": 1, "ppo_epochs": 1, "eval_steps": 0, "stream_training": False},
    ).out
    assert re.search(r"step \d/2: train [\d.]+ s  1/\d micro-batches", out)


def test_fine_tuning_says_how_far_its_steps_and_validations_are(run):
    sft = {
        "train_files": ["rows.jsonl"],
        "val_files": ["rows.jsonl"] * 8,
        "sequence_length": 64,
        "use_dynamic_batching_in_train": False,
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "track_with": ["stdout"],
    }
    out = run("sft", sft).out
    assert re.search(r"step \d/2: train [\d.]+ s  \d/4 micro-batches", out)
    assert re.search(
        r"step 1/2: val [\d.]+ s  \d/\d micro-batches|^  val [\d.]+ s  \d/\d micro-batches", out, re.MULTILINE
    )


@pytest.mark.parametrize(("verb", "arguments"), [("rollout", []), ("eval", ["--sampled", "--samples", "2"])])
def test_what_plays_without_training_says_how_far_it_is(run, verb, arguments):
    assert re.search(r"\d/8 episodes  [\d,]+ tokens", run(verb, TRAIN, *arguments).err)


def test_a_quiet_run_says_nothing_of_it(run):
    assert "episodes" not in run("train", {**TRAIN, "max_steps": 1, "eval_steps": 0}, "--quiet").out


def test_steps_that_take_long_come_with_smaller_sizes_once(run, monkeypatch):
    monkeypatch.setattr("turnwise.tracking.pace.LONG_STEP_S", 0.0, raising=False)
    warned = [line for line in run("train", TRAIN).err.splitlines() if "smaller sizes to try" in line]
    assert len(warned) == 1
    for change in (
        "rollout_batch_size=4",
        "custom_envs.Toy.max_steps=1",
        "custom_envs.Toy.max_tokens_per_step=8",
    ):
        assert change in warned[0]


class TestFirstEstimate:
    """Before the first step has ended; by a clock that the test sets."""

    @pytest.fixture
    def parts(self):
        stopwatch = Stopwatch()
        pace = Pace(10, stopwatch=stopwatch, tokens_per_episode=100, advice="smaller sizes to try: x=1")
        return stopwatch, Screen("lake", AGENTIC_COLUMNS, pace)

    def test_rollouts_are_judged_by_tokens_before_an_episode_has_ended(self, parts):
        stopwatch, screen = parts
        screen.pace.begin_phase("total", 0.0)
        screen.pace.begin_phase("rollout", 0.0)
        stopwatch.work = Work("episodes", 8)
        assert "time left unknown" in plain(screen.render(20.0))
        stopwatch.num_sampled = 200
        text = plain(screen.render(20.0))
        assert "rollout 20.0 s  0/8 episodes  200 tokens, 10/s  at most 1:00 more" in text
        # 20 s for a quarter: 80 s of rollouts a step, ten steps.
        assert "about 13:00 + training left" in text

    def test_ended_episodes_count_where_they_are_more(self, parts):
        stopwatch, screen = parts
        screen.pace.begin_phase("rollout", 0.0)
        stopwatch.num_sampled = 100
        stopwatch.work = Work("episodes", 8, finished=4)
        assert "4/8 episodes" in plain(screen.render(10.0)) and "at most 0:10 more" in plain(
            screen.render(10.0)
        )

    def test_training_completes_the_estimate(self, parts):
        stopwatch, screen = parts
        screen.pace.begin_phase("val", 0.0)
        screen.pace.begin_phase("total", 100.0)
        screen.pace.begin_phase("rollout", 100.0)
        screen.pace.begin_phase("train", 160.0)
        stopwatch.work = Work("micro-batches", 4, finished=1, tokens=500)
        text = plain(screen.render(170.0))
        assert "1/4 micro-batches  500 tokens, 50/s  0:30 more" in text
        assert "about 15:30 left" in text, "100 s a step without the validation, 70 s of the first are over"

    def test_advice_waits_until_the_estimate_can_be_believed(self, parts, caplog):
        stopwatch, screen = parts
        screen.pace.begin_phase("rollout", 0.0)
        stopwatch.work = Work("episodes", 8)
        stopwatch.num_sampled = 8
        screen.pace.advise(10.0)
        assert not caplog.records
        for now in (20.0, 30.0):
            screen.pace.advise(now)
        [record] = caplog.records
        assert "33:20" in record.getMessage() and "x=1" in record.getMessage()

    def test_lines_come_after_a_silence_only(self, parts):
        stopwatch, screen = parts
        out = io.StringIO()
        tracker = TerminalTracker(AGENTIC_COLUMNS, screen.pace, file=out)
        screen.pace.begin_phase("rollout", 0.0)
        stopwatch.work = Work("episodes", 8)
        start = tracker._printed_at
        for seconds in (SILENCE_S - 1, SILENCE_S + 1, SILENCE_S + 20, 2 * SILENCE_S + 2):
            tracker.tick(start + seconds)
        assert len(out.getvalue().splitlines()) == 2
