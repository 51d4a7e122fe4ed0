"""The environments of the examples' configs: each passes the contract check, and an agent plays it at
random."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from scripted_conversation import ScriptedConversation

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.config import load_config
from turnwise.envs.registry import make_env
from turnwise.protocols import Env
from turnwise.testing.env_contract import check_env_contract
from turnwise.types import SamplingParams, Task

EXAMPLES = Path(__file__).parents[3] / "examples"
ACTIONS = {
    "gymnasium/taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "gymnasium/cliff_walking": ["up", "right", "down", "left"],
    "gymnasium/minigrid": ["left", "right", "forward", "pickup", "toggle"],
    "textarena/guess_the_number": [str(number) for number in range(1, 21)],
    "reasoning_gym/chain_sum": [str(number) for number in range(-20, 60)],
}


def test_every_example_of_a_package_is_played_here() -> None:
    folders = {name.partition("/")[0] for name in ACTIONS}
    found = {
        path.relative_to(EXAMPLES).with_suffix("").as_posix()
        for name in folders
        for path in (EXAMPLES / name).glob("*.yaml")
    }
    assert found == set(ACTIONS)


@pytest.mark.parametrize("name", ACTIONS)
def test_an_example_passes_the_contract_and_is_played(name: str) -> None:
    config, _ = load_config(EXAMPLES / f"{name}.yaml", ["pretrain=models/none"])
    [(tag, env)] = config.custom_envs.items()

    def make(task: Task | None = None) -> Env:
        return make_env(env.env_type, env.env_config, task.split if task else "val")

    words = random.Random(0).choices(ACTIONS[name], k=env.max_steps)
    check_env_contract(make, words)
    settings = EnvAgentSettings(
        tag=tag,
        max_steps=env.max_steps,
        max_tokens_per_step=env.max_tokens_per_step,
        system_template=env.agent_system_template,
        turn_template=env.agent_template,
        action_pattern=env.action_pattern,
    )
    conversation = ScriptedConversation(["no action at all", *(f"<answer>{word}</answer>" for word in words)])
    task = Task(id=f"train/{tag}/0", tag=tag, split="train", seed=8)
    agent = EnvAgent(make, settings)
    [trajectory] = asyncio.run(
        agent.run(task, 0, lambda *_, **__: conversation, SamplingParams(max_new_tokens=8))
    )
    assert 1 <= len(trajectory.turns) <= env.max_steps
    assert trajectory.turns[0].action is None and trajectory.turns[1].action == words[0]
    assert 0.0 < trajectory.metrics["action_is_valid"] < 1.0 and trajectory.metrics["success"] in (0.0, 1.0)
    assert all(turn.observation and len(turn.observation) < 300 for turn in trajectory.turns)
