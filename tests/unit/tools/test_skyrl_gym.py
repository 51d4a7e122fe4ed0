"""skyrl-gym's environments as simulated users, over a stand-in of the library."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from turnwise.errors import EnvironmentFault, NotAvailableError
from turnwise.tools.interactions import Interactions
from turnwise.tools.skyrl_gym import SkyRLGym
from turnwise.types import Message, Task, Turn


class Guess:
    """Says higher or lower. Its third answer ends the game."""

    def __init__(self, extras: dict[str, Any]) -> None:
        assert "reward_spec" in extras, "reward_spec field is required"
        self.number = extras["reward_spec"]["ground_truth"]
        self.prompt = extras.get("prompt")
        self.turns = 0
        self.is_closed = False

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        return self.prompt or prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        is_right = int(action) == self.number
        is_done = is_right or self.turns == 3
        said = (
            [] if is_done else [{"role": "user", "content": "higher"}, {"role": "user", "content": "go on"}]
        )
        step = {
            "observations": said,
            "reward": float(is_right),
            "done": is_done,
            "metadata": {"guess": int(action)},
        }
        return step | {"postprocessed_action": action.strip()}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    envs: list[Guess] = []

    def make(env_class: str, extras: dict[str, Any]) -> Guess:
        envs.append(Guess(extras))
        return envs[-1]

    gym = ModuleType("skyrl_gym")
    vars(gym).update(make=make, envs=SimpleNamespace(registration=SimpleNamespace(registry={"guess": None})))
    monkeypatch.setitem(sys.modules, "skyrl_gym", gym)
    return envs


def converse(answers: list[str], **kwargs: Any) -> tuple[list[str], list[Turn], dict[str, float]]:
    extra = {"interaction_kwargs": {"name": "gym", **kwargs}}
    task = Task(id="t", tag="data", split="train", seed=0, payload={"extra_info": extra})
    said: list[str] = []
    turns: list[Turn] = []

    async def play() -> dict[str, float]:
        async with Interactions({"gym": SkyRLGym({})}).open(task, 0) as user:
            transcript: list[Message] = [{"role": "user", "content": "Guess."}]
            for answer in answers:
                transcript.append({"role": "assistant", "content": answer})
                turns.append(Turn(prompt_ids=None, response_ids=None, logprobs=None))
                messages = await user.reply(transcript, turns[-1])
                transcript += messages
                said.extend(message["content"] for message in messages)
            return await user.metrics()

    return said, turns, asyncio.run(play())


GUESS = {"env_class": "guess", "reward_spec": {"ground_truth": 5}}


def test_each_step_answers_and_rewards_a_turn(made: list[Guess], caplog: pytest.LogCaptureFixture) -> None:
    said, turns, metrics = converse(["3", "5 "], **GUESS)
    assert said == ["higher\ngo on"] and [turn.reward for turn in turns] == [0.0, 1.0]
    assert turns[1].metrics == {"interaction/guess": 5.0, "interaction/steps": 2.0}
    assert metrics["interaction/gym/score"] == 1.0 and made[0].is_closed
    assert sum("postprocessed_action" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"env_class": "guess"}, "interaction_kwargs.*reward_spec"),
        ({**GUESS, "env_class": "gues"}, "env_class.*'guess'"),
        ({**GUESS, "prompt": [{"role": "user", "content": "Other."}]}, "first prompt"),
    ],
)
def test_what_can_not_be_played_is_named(made: list[Guess], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        converse(["5"], **kwargs)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(NotAvailableError, match="skyrl-gym"):
        SkyRLGym({})
