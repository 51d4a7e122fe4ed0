"""The custom environment of docs/environments.md runs as it stands there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.envs.registry import env_class, make_env
from turnwise.testing.env_contract import check_env_contract
from turnwise.testing.scripted_conversation import ScriptedConversation
from turnwise.types import SamplingParams, Task

DOC = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.fixture
def guess_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    [code] = re.findall(r"```python\n(# guess\.py\n.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()[1:]) <= 15
    (tmp_path / "guess.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "guess:GuessEnv"


def test_it_passes_the_contract_and_is_won_by_counting(guess_env: str) -> None:
    check_env_contract(env_class(guess_env), ["1", "5", "x"])
    agent = EnvAgent(lambda task: make_env(guess_env, {}, task.split), EnvAgentSettings(tag="Guess", max_steps=9))
    task = Task(id="train/Guess/0", tag="Guess", split="train", seed=3)
    conversation = ScriptedConversation(f"<answer>{number}</answer>" for number in range(1, 10))
    [trajectory] = asyncio.run(agent.run(task, 0, lambda *_, **__: conversation, SamplingParams(max_new_tokens=8)))
    assert trajectory.status == "finished"
    assert trajectory.score == trajectory.metrics["success"] == 1.0
    assert all(turn.observation == "larger" for turn in trajectory.turns[1:])
