"""Scripted episodes: demonstrations and baselines."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from odd_envs import FixedEnv
from scripted_conversation import ScriptedConversation
from toy_envs import BanditEnv

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.envs.base import Step
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.parsing import parse_action
from turnwise.envs.players import ErringPlayer, ExpertPlayer, GivingUpPlayer, Player, RandomPlayer
from turnwise.errors import ConfigError, RolloutError
from turnwise.play.demonstrations import MakePlayer, demonstrations, play, write_jsonl
from turnwise.spec import THINK_ANSWER_PATTERN
from turnwise.types import SamplingParams, Task, derive_seed

SETTINGS = EnvAgentSettings(tag="Lake", max_steps=12, system_template="Be brief.", max_tokens_per_step=16)
FREE = EnvAgentSettings(tag="Lake", action_pattern=None)


def tasks(count: int) -> list[Task]:
    return [
        Task(id=f"train/Lake/{i}", tag="Lake", split="train", seed=derive_seed(0, i)) for i in range(count)
    ]


def firm_lake(task: Task) -> FrozenLakeEnv:
    return FrozenLakeEnv(is_slippery=False, split=task.split)


def teacher(env: FrozenLakeEnv, task: Task) -> Player:
    return ErringPlayer(ExpertPlayer(env), 0.5, derive_seed(task.seed, "teacher"))


def guesser(env: Any, task: Task) -> Player:
    return RandomPlayer(env, task.seed)


def test_a_demonstration_is_what_the_agent_would_have_said_and_seen() -> None:
    for task, messages in zip(
        tasks(10), demonstrations(firm_lake, SETTINGS, teacher, tasks(10)), strict=True
    ):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        conversation = ScriptedConversation(said)
        agent = EnvAgent(firm_lake, SETTINGS)
        asyncio.run(agent.run(task, 0, lambda *_, c=conversation, **__: c, SamplingParams(max_new_tokens=16)))
        assert conversation.messages == messages
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert messages[-1]["role"] == "assistant"
        assert all(
            parse_action(text, SETTINGS.action_pattern) in ("Left", "Down", "Right", "Up") for text in said
        )
        assert len(said) <= SETTINGS.max_steps


def test_demonstrations_are_reproducible_and_lazy() -> None:
    first = list(demonstrations(firm_lake, SETTINGS, teacher, tasks(5)))
    assert first == list(demonstrations(firm_lake, SETTINGS, teacher, tasks(5)))
    endless = demonstrations(firm_lake, SETTINGS, teacher, (task for task in iter(lambda: tasks(1)[0], None)))
    assert next(endless) == first[0]
    endless.close()


def test_an_episode_ends_where_the_player_gives_up() -> None:
    def tiring(num_actions: int) -> MakePlayer:
        def make_player(env: FrozenLakeEnv, task: Task) -> GivingUpPlayer:
            asked = iter(range(num_actions + 1))
            return GivingUpPlayer(teacher(env, task), lambda: next(asked) == num_actions)

        return make_player

    [whole] = demonstrations(firm_lake, SETTINGS, teacher, tasks(1))
    [cut] = demonstrations(firm_lake, SETTINGS, tiring(2), tasks(1))
    assert [message["role"] for message in cut][-4:] == ["user", "assistant"] * 2 and cut == whole[: len(cut)]
    assert list(demonstrations(firm_lake, SETTINGS, tiring(0), tasks(3))) == []
    [outcome] = play(firm_lake, SETTINGS, tiring(2), tasks(1))
    assert not outcome.is_success


def test_baselines_rank_as_they_must() -> None:
    episodes = tasks(150)

    def share(make_player: MakePlayer) -> float:
        outcomes = play(firm_lake, SETTINGS, make_player, episodes)
        assert all(outcome.is_success == (outcome.score == 1.0) for outcome in outcomes)
        return sum(outcome.is_success for outcome in outcomes) / len(outcomes)

    best = share(lambda env, task: ExpertPlayer(env))
    erring = share(teacher)
    worst = share(guesser)
    assert best == 1.0
    assert worst < 0.2 < erring < 0.9


def test_a_partial_success_counts_as_in_an_evaluation() -> None:
    half = FixedEnv("done", 1.0, True, False, {"metrics": {"success": 0.4}})
    [outcome] = play(lambda _: half, SETTINGS, guesser, tasks(1))
    assert outcome == (False, 1.0)


class BareEnv(BanditEnv):
    """A bandit that reports no metric."""

    def step(self, action: str) -> Step:
        return "done", float(action == "b"), True, False, {}


def test_an_environment_without_a_success_metric_succeeds_by_its_score() -> None:
    outcomes = play(lambda _: BareEnv(), SETTINGS, guesser, tasks(20))
    assert {tuple(outcome) for outcome in outcomes} == {(True, 1.0), (False, 0.0)}


def test_answers_that_the_pattern_cannot_read_are_refused() -> None:
    thinking = EnvAgentSettings(tag="Lake", action_pattern=THINK_ANSWER_PATTERN)
    assert next(demonstrations(firm_lake, thinking, teacher, tasks(1)))[-1]["content"].startswith(
        "<think></think><answer>"
    )
    bracketed = EnvAgentSettings(tag="Lake", action_pattern=r"\[(.*?)\]")
    with pytest.raises(ConfigError, match=r"action_pattern .* in none of .*<answer>"):
        next(demonstrations(firm_lake, bracketed, teacher, tasks(1)))


def test_jsonl_holds_one_conversation_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "demonstrations.jsonl"
    episodes = list(demonstrations(firm_lake, SETTINGS, teacher, tasks(3)))
    assert write_jsonl(path, iter(episodes)) == 3
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["messages"] for line in lines] == episodes


def test_episodes_before_a_fault_are_kept() -> None:
    class Fragile(BanditEnv):
        def __init__(self, task: Task) -> None:
            super().__init__()
            self.task = task

        def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            if self.task.id.endswith("/5"):
                raise ValueError("no sixth one")
            return super().reset(seed=seed)

    played = demonstrations(Fragile, FREE, guesser, tasks(9))
    assert [next(played)[-1]["role"] for _ in range(5)] == ["assistant"] * 5
    with pytest.raises(RolloutError, match="no sixth one"):
        next(played)


def test_an_episode_that_takes_long_is_there_before_the_next_one_begins() -> None:
    began = []

    def make_env(task: Task) -> BanditEnv:
        began.append(task.id)
        time.sleep(0.11)
        return BanditEnv()

    played = demonstrations(make_env, FREE, guesser, tasks(3))
    for number in range(1, 4):
        assert next(played) and len(began) == number


def test_tasks_may_run_an_event_loop_of_their_own() -> None:
    async def fetched(task: Task) -> Task:
        return task

    asked = (asyncio.run(fetched(task)) for task in tasks(40))
    assert len(list(demonstrations(firm_lake, SETTINGS, teacher, asked))) == 40


def test_ctrl_c_ends_a_consumer_that_stops_early_too() -> None:
    class Pressed(BanditEnv):
        num_steps = 0

        def step(self, action: str) -> Step:
            Pressed.num_steps += 1
            if Pressed.num_steps == 5:
                signal.raise_signal(signal.SIGINT)
            return super().step(action)

    played = demonstrations(lambda _: Pressed(), FREE, guesser, tasks(9))
    with pytest.raises(KeyboardInterrupt):
        next(played)
