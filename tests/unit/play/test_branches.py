"""Branches of an episode in the terminal: a title says which turn a turn goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from gateway_episodes import function_player, play_episodes
from http_players import forked

from turnwise.cli.main import main
from turnwise.envs.recording import View
from turnwise.pipelines.pictures import frames
from turnwise.play.recorded_screen import RecordedScreen
from turnwise.runtime.console import open_console


def titles(said: str) -> list[str]:
    lines = [line.strip("━ ") for line in said.splitlines() if line.startswith("━━")]
    return [line for line in lines if line.startswith("turn")]


def test_play_shows_an_agent_of_the_gateway(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "P _ G", "answer": "a"}))
    config = {
        "pretrain": str(tiny_model),
        "output_dir": str(tmp_path / "runs"),
        "sequence_length": 256,
        "data": {"train_files": str(tmp_path / "rows.jsonl"), "default_agent": "gateway"},
        "actor_infer": {"generating_args": {"max_new_tokens": 8}},
        "agent": {"play": "http_players:forked"},
    }
    (tmp_path / "play.yaml").write_text(yaml.safe_dump(config))
    command = ["play", str(tmp_path / "play.yaml"), "--policy", str(tiny_model), "--no-color"]
    assert main(command) == 0
    first, second, third = titles(capsys.readouterr().out)
    assert "a new context" in first
    assert second.startswith("turn 2") and "off turn" not in second
    assert third.startswith("turn 3") and "off turn 1" in third
    assert second.partition("context ")[2] == third.partition("context ")[2], "both go on from turn 1"


def test_a_recorded_branch_has_the_size_of_its_own_context(capsys: pytest.CaptureFixture[str]) -> None:
    [trajectory] = play_episodes(function_player(forked, "model"), ["left", "right", "done"])
    RecordedScreen(open_console(), None).show(trajectory, "an episode")
    size = trajectory.turns[0].num_tokens
    said = titles(capsys.readouterr().out)
    assert [title.endswith(f"context {size}") for title in said] == [False, True, False]
    assert said[2].startswith(f"turn 3, context {size}, off turn 1")


def test_a_picture_names_the_turn_that_a_branch_goes_on_from() -> None:
    [trajectory] = play_episodes(function_player(forked, "model"), ["left", "right", "done"])
    views = [View(("", {}), "seen")] * 4
    assert ["off turn 1" in frame.title for frame in frames(trajectory, views)] == [False, False, False, True]
