"""Rewards over groups: what they are called with, what they may return, and what becomes of those that
break."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest
import toy_rewards
from messages import says
from scored_groups import group, of, scored, trajectory

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.assemble.reward_model import ModelReward
from turnwise.chat.conversation import TextAnswer, TextConversation
from turnwise.data.prompts import prompt_of
from turnwise.data.reward_functions import FunctionReward
from turnwise.data.rewards import GroupReward, messages_of
from turnwise.data.tables import TableRow
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import SamplingParams, Task


def test_weighted_parts_add_up_to_the_score_and_metrics_are_raw() -> None:
    played = group("abc", "a")
    assert scored(played, (of(toy_rewards.of_answer), 2.0), (of(toy_rewards.length, power=2.0), 0.5)) == []
    first, second = played.trajectories
    assert first.outcome_rewards == {"of_answer": 2.0, "length": 0.45} and first.score == pytest.approx(2.45)
    assert first.metrics == {"reward/of_answer": 1.0, "reward/length": 0.9, "success": 1.0}
    assert second.metrics["success"] == 0.0, "its score is positive, but the first reward is 0"
    assert second.score == pytest.approx(0.05)


def test_a_coroutine_function_and_a_reward_of_whole_groups() -> None:
    played = group("abc", "a")
    assert (
        scored(
            played,
            (of(toy_rewards.length_later), 1.0),
            (GroupReward("Longest", toy_rewards.Longest(0.25)), 2.0),
        )
        == []
    )
    first, second = played.trajectories
    assert first.turns[0].reward == 0.5 and first.outcome_rewards == {"length_later": 0.3, "Longest": 2.0}
    assert first.score == pytest.approx(2.8) and second.score == pytest.approx(0.6)


def test_a_greedy_sibling_is_scored_too_and_a_failed_one_is_not_asked_for() -> None:
    played = group("abc", "broken", "ab")
    played.trajectories[1].error, played.trajectories[1].status = "it failed before", "failed"
    played.greedy = trajectory("abcd", 3)
    seen: list[list[str]] = []

    def note(completions: list[str]) -> list[float]:
        seen.append(completions)
        return [float(len(text)) for text in completions]

    assert scored(played, (of(note), 1.0)) == []
    assert (
        seen == [["abc", "ab", "abcd"]]
        and played.greedy.score == 4.0
        and played.trajectories[1].outcome_rewards == {}
    )


def test_messages_and_prompts_are_there_for_those_that_ask() -> None:
    seen = {}

    def note(completions, messages, prompts):
        seen.update(messages=messages, prompts=prompts)
        return [0.0] * len(completions)

    scored(group("abc"), (of(note), 1.0))
    assert seen["prompts"] == ["Say it"]
    assert seen["messages"] == [
        [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "abc"}]
    ]
    of_environment = Task("train/Lake/0", "Lake", "train", 1)
    assert messages_of(trajectory("Left", 0, of_environment), "prompt") == [
        {"role": "user", "content": "Say it"},
        {"role": "assistant", "content": "Left"},
    ]


@pytest.mark.parametrize("mode", ["trajectory", "step"])
def test_messages_of_an_environment_have_its_templates_and_the_system_message_once(mode) -> None:
    async def answer(messages, sampling, tools):
        return TextAnswer("Down", "stop")

    settings = EnvAgentSettings("Lake", 2, 8, "RULES", "Seen: {observation}", None, mode, history_length=0)
    agent = EnvAgent(lambda task: FrozenLakeEnv(map_rows=["SFF", "FHF", "FFG"], is_slippery=False), settings)
    task, sampling = Task("train/Lake/0", "Lake", "train", 1), SamplingParams(8)
    [played] = asyncio.run(
        agent.run(task, 0, lambda sampling, **_: TextConversation(answer, sampling), sampling)
    )
    heard = messages_of(played, "prompt")
    assert [message["role"] for message in heard] == ["system", "user", "assistant", "user", "assistant"]
    assert heard[0]["content"] == "RULES"
    seen = zip(heard[1::2], played.turns, strict=True)
    assert all(message["content"].endswith(f"Seen: {turn.observation}") for message, turn in seen)
    heard[0]["content"] = "changed by a reward"
    assert messages_of(played, "prompt")[0]["content"] == "RULES"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (toy_rewards.raising, says("data.reward raising", "ValueError", "no such judge")),
        (toy_rewards.leaving, "sys.exit"),
        (
            toy_rewards.too_few,
            says("data.reward too_few", "1 values", "2 completions"),
        ),
        (toy_rewards.not_finite, says("data.reward not_finite", "nan")),
        (lambda completions: "no list", "returned a str"),
        (lambda completions: [None, 1.0], "each returned None"),
        (lambda completions: [10**400, 1], r"returned \[1000"),
    ],
)
def test_a_broken_reward_fails_its_group_with_a_sentence(function, said: str) -> None:
    played = group("abc", "a")
    failed = scored(played, (of(function), 1.0))
    assert failed == played.trajectories
    assert all(
        t.status == "failed" and re.search(said, str(t.error)) and not t.outcome_rewards for t in failed
    )


def test_one_that_hangs_is_ended_by_its_deadline() -> None:
    async def for_ever(completions):
        await asyncio.sleep(60)

    for function in (for_ever, toy_rewards.slow):
        [failed] = scored(group("abc"), (of(function), 1.0), timeout_s=0.01)
        assert "data.reward_timeout_s" in str(failed.error) and function.__name__ in str(failed.error)


def test_a_reward_model_reads_a_call_once() -> None:
    written: list[list[dict[str, object]]] = []

    class Writer:
        def apply_chat_template(self, messages, **_):
            written.append(messages)
            return [1, 2]

    async def forward(samples, output):
        return [[0.0] for _ in samples]

    role = SimpleNamespace(plan=SimpleNamespace(max_length=9), forward_async=forward)
    played = group("call it")
    reply = {"role": "assistant", "content": "call it"}
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    played.trajectories[0].turns[0].messages = [reply | {"tool_calls": [call], "call_errors": []}]
    asyncio.run(ModelReward(role, Writer(), "prompt", Watchdog(), 60.0)(played))
    assert written == [[reply]], "the template would write the call beside the text that made it"


def test_a_column_that_an_argument_of_the_same_name_would_hide_is_refused() -> None:
    def judged(completions, messages, answer="x"):
        return [0.0] * len(completions)

    def taking_all(completions, **columns):
        return [0.0] * len(completions)

    row = TableRow("rows.jsonl, line 3", {"prompt": "?", "messages": ["mine"], "extra": {"answer": "4"}})
    with pytest.raises(DataError, match=says("line 3", "data.reward judged", "`messages`")):
        of(judged).check([row])
    FunctionReward("judged", judged, str, "messages").check([row])  # the prompt itself
    of(taking_all).check([row])
    with pytest.raises(DataError, match=says("`answer`", "args", "'extra.answer'")):
        of(taking_all, answer="fixed").check([row])
    with pytest.raises(DataError, match=says("`completions`", "run")):
        of(taking_all).check([TableRow("line 1", {"completions": "mine"})])


def test_what_cannot_be_called_so_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("parameter", "`completions`")):
        of(lambda texts: [])
    with pytest.raises(ConfigError, match=says("args.weight", "completions, power")):
        of(toy_rewards.length, weight=1)


def test_keys_of_messages_that_are_null_are_left_out() -> None:
    said = [
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "user", "content": "a", "tool_calls": None},
    ]
    assert prompt_of({"prompt": said}, "prompt") == [said[0], {"role": "user", "content": "a"}]
