"""What docs/environments.md says: its custom environment runs, its links lead somewhere, and its tables name
every key."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path

import pytest
from scripted_conversation import ScriptedConversation

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.envs.reasoning_gym_env import RUNS_ANSWERS, UNREPEATABLE
from turnwise.envs.registry import env_class, make_env
from turnwise.envs.textarena_env import GAMES, REFUSED
from turnwise.spec import ENVS
from turnwise.testing.env_contract import check_env_contract
from turnwise.types import SamplingParams, Task

DOC = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.fixture
def guess_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    [code] = re.findall(r"```python\n(# guess\.py\n.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "guess.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "guess:GuessEnv"


def test_it_passes_the_contract_and_is_won_by_counting(guess_env: str) -> None:
    check_env_contract(env_class(guess_env), ["1", "5", "x"])
    agent = EnvAgent(
        lambda task: make_env(guess_env, {}, task.split), EnvAgentSettings(tag="Guess", max_steps=9)
    )
    task = Task(id="train/Guess/0", tag="Guess", split="train", seed=3)
    conversation = ScriptedConversation(f"<answer>{number}</answer>" for number in range(1, 10))
    [trajectory] = asyncio.run(
        agent.run(task, 0, lambda *_, **__: conversation, SamplingParams(max_new_tokens=8))
    )
    assert trajectory.status == "finished"
    assert trajectory.score == trajectory.metrics["success"] == 1.0
    assert [turn.observation for turn in trajectory.turns] == [
        f"It is one of {' '.join(str(number) for number in range(first, 10))}."
        for first in range(1, len(trajectory.turns) + 1)
    ]


def sections() -> dict[str, str]:
    """Title of a section → its text."""
    parts = re.split(r"^## (.*)\n", DOC.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("env_type", [env_type for env_type, entry in ENVS.items() if entry])
def test_every_environment_has_a_table_of_its_arguments(env_type: str) -> None:
    [text] = [text for title, text in sections().items() if f"`env_type: {env_type}`" in title]
    [table] = re.findall(r"\| `env_config` \|.*\n\|---.*\n((?:\|.*\n)+)", text)
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(
        inspect.signature(env_class(env_type)).parameters
    )


def test_links_and_configs_are_there() -> None:
    text = DOC.read_text(encoding="utf-8")
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in sections()}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    files = re.findall(r"`(examples/[^`]+\.yaml)`", text)
    assert len(files) >= 6 and all((DOC.parents[1] / file).is_file() for file in files)


def test_what_is_played_and_what_is_refused_is_listed() -> None:
    text = sections()
    [textarena] = [section for title, section in text.items() if title.startswith("Textarena")]
    played, refused = textarena.split("*Refused*")
    assert all(re.search(rf"\b{game}\b", played) for game in GAMES) and all(
        game in refused for game in REFUSED
    )
    [reasoning] = [section for title, section in text.items() if title.startswith("Reasoning-gym")]
    allowed, refused = reasoning.split("*Refused:*")
    assert all(f"`{name}`" in allowed for name in RUNS_ANSWERS) and all(
        f"`{name}`" in refused for name in UNREPEATABLE
    )
