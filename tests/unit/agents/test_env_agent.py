"""Episodes of EnvAgent with scripted responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from odd_envs import FixedEnv, NaNEnv, RaisingEnv, SlowEnv, StuckEnv, WrongTupleEnv, block_for_ever
from scripted_conversation import ScriptedConversation
from toy_envs import BanditEnv, IdentityEnv, LettersEnv

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.errors import ConfigError, EnvironmentFault
from turnwise.protocols import Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import SamplingParams, Task, Trajectory

TASK = Task(id="train/Lake/0", tag="Lake", split="train", seed=7)
SAMPLING = SamplingParams(max_new_tokens=64)


def lake(task: Task) -> FrozenLakeEnv:
    return FrozenLakeEnv(map_rows=["SFF", "FHF", "FFG"], is_slippery=False, format_penalty=-0.5)


def answers(actions: Iterable[str]) -> list[str]:
    return [f"<answer>{action}</answer>" for action in actions]


def run(
    make_env: Callable[[Task], Env], texts: Iterable[str], **settings: Any
) -> tuple[Trajectory, ScriptedConversation]:
    conversation = ScriptedConversation(texts)
    agent = EnvAgent(make_env, EnvAgentSettings(tag="Lake", **settings))
    [trajectory] = asyncio.run(agent.run(TASK, 2, lambda *_, **__: conversation, SAMPLING))
    return trajectory, conversation


def test_a_finished_episode_holds_what_was_seen_done_and_earned() -> None:
    texts = [*answers(["down", "Jump", "Down", "Right"]), "no answer", "<answer>RIGHT</answer>"]
    trajectory, conversation = run(
        lake, texts, turn_template="{actions_left}\n{observation}", max_tokens_per_step=24
    )
    assert (trajectory.task, trajectory.sibling, trajectory.status, trajectory.limit) == (
        TASK,
        2,
        "finished",
        None,
    )
    assert all(turn is said for turn, said in zip(trajectory.turns, conversation.turns, strict=True))
    assert [turn.action for turn in trajectory.turns] == ["down", "Jump", "Down", "Right", None, "RIGHT"]
    assert [turn.reward for turn in trajectory.turns] == [0.0, -0.5, 0.0, 0.0, -0.5, 1.0]
    assert [turn.observation[0] for turn in trajectory.turns] == ["P", "_", "_", "_", "_", "_"]
    assert [str(turn.state_key).split(":")[1] for turn in trajectory.turns] == ["0", "3", "3", "6", "7", "7"]
    assert trajectory.turns[1].metrics["action_is_valid"] == 0.0
    assert all(turn.step_s > 0 for turn in trajectory.turns)
    assert trajectory.metrics == {
        "num_actions": 6.0,
        "success": 1.0,
        "action_is_valid": pytest.approx(4 / 6),
        "action_is_effective": pytest.approx(4 / 6),
        "format_penalty": pytest.approx(-1 / 6),
    }
    assert conversation.budgets == [24] * 6
    users = [message["content"] for message in conversation.messages if message["role"] == "user"]
    assert users[0].startswith("You are on a frozen lake.") and users[0].endswith("20\nP _ _\n_ O _\n_ _ G")
    assert users[1] == "19\n_ _ _\nP O _\n_ _ G"


def test_the_episode_is_that_of_the_tasks_seed() -> None:
    trajectory, _ = run(lambda _: FrozenLakeEnv(size=6), answers(["Up"]), max_steps=1)
    assert trajectory.turns[0].observation == FrozenLakeEnv(size=6).reset(seed=TASK.seed)[0]


@pytest.mark.parametrize(
    ("texts", "max_steps", "status", "limit", "num_turns"),
    [
        (answers(["Up"] * 9), 4, "truncated", "max_steps", 4),
        (answers(["Up"] * 3), 9, "truncated", "sequence_length", 3),
        (answers(["Right", "Down"]), 2, "finished", None, 2),
    ],
)
def test_each_limit_has_its_name(
    texts: list[str], max_steps: int, status: str, limit: str | None, num_turns: int
) -> None:
    trajectory, _ = run(lake, texts, max_steps=max_steps)
    assert (trajectory.status, trajectory.limit, len(trajectory.turns)) == (status, limit, num_turns)
    assert trajectory.metrics["num_actions"] == num_turns


def test_a_cut_by_the_environment_bootstraps() -> None:
    trajectory, _ = run(lambda _: FixedEnv("too late", 0.25, False, True, {}), answers(["a"]))
    assert (trajectory.status, trajectory.limit, trajectory.score) == ("truncated", "environment", 0.25)
    assert trajectory.bootstraps


def test_without_a_state_key_the_observation_is_the_state() -> None:
    trajectory, _ = run(lambda _: IdentityEnv(), answers("abc"))
    assert [turn.state_key for turn in trajectory.turns] == [turn.observation for turn in trajectory.turns]


def test_a_state_key_of_none_is_kept_so_that_estimators_can_refuse_it() -> None:
    class Nameless(IdentityEnv):
        def state_key(self) -> None:
            pass

    trajectory, _ = run(lambda _: Nameless(), answers("abc"))
    assert [turn.state_key for turn in trajectory.turns] == [None] * 3


def test_asynchronous_environments_are_awaited_and_overlap() -> None:
    agent = EnvAgent(lambda _: SlowEnv(delay_s=0.01), EnvAgentSettings(tag="Slow"))

    async def episodes() -> list[list[Trajectory]]:
        def open_conversation(*_: Any, **__: Any) -> ScriptedConversation:
            return ScriptedConversation(["x"] * 5)

        return await asyncio.gather(*(agent.run(TASK, i, open_conversation, SAMPLING) for i in range(20)))

    results = asyncio.run(episodes())
    assert [trajectory.status for [trajectory] in results] == ["finished"] * 20
    assert [trajectory.sibling for [trajectory] in results] == list(range(20))


class ClosingEnv(BanditEnv):
    """Counts its closes."""

    num_closes = 0

    def close(self) -> None:
        self.num_closes += 1


class FailingClosingEnv(ClosingEnv, RaisingEnv):
    pass


class FailingResetEnv(ClosingEnv):
    def reset(self, *, seed: int | None = None) -> Any:
        raise OSError("no lake here")


@pytest.mark.parametrize(
    ("env", "texts", "error"),
    [
        (ClosingEnv(), answers("b"), None),
        (ClosingEnv(), [], None),
        (FailingClosingEnv(), answers("b"), RuntimeError),
        (FailingResetEnv(), answers("b"), OSError),
    ],
)
def test_the_environment_is_closed_once_on_every_path(
    env: ClosingEnv, texts: list[str], error: type[Exception] | None
) -> None:
    if error is None:
        run(lambda _: env, texts)
    else:
        with pytest.raises(error):
            run(lambda _: env, texts)
    assert env.num_closes == 1


def test_a_cancelled_episode_closes_its_environment() -> None:
    env = ClosingEnv()

    class NeverAnswers(ScriptedConversation):
        async def generate(self, new_messages: Any, options: Any = None) -> None:
            await asyncio.Event().wait()

    async def cancel() -> None:
        agent = EnvAgent(lambda _: env, EnvAgentSettings(tag="Lake"))
        episode = asyncio.create_task(agent.run(TASK, 0, lambda *_, **__: NeverAnswers([]), SAMPLING))
        await asyncio.sleep(0)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(cancel())
    assert env.num_closes == 1


class OldResetEnv(BanditEnv):
    def reset(self, *, seed: int | None = None) -> Any:
        return "pull"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (NaNEnv(), r"Lake \(NaNEnv\), turn 1: the reward is nan \(float\); it must be a finite number"),
        (FixedEnv("done", "1.0", True, False, {}), r"the reward is '1\.0' \(str\)"),
        (WrongTupleEnv(), r"Lake \(WrongTupleEnv\), turn 1: got a tuple of 4; step returns the tuple"),
        (OldResetEnv(), r"reset: got a str; reset returns the tuple \(observation, info\)"),
        (FixedEnv(b"done", 1.0, True, False, {}), "the observation is a bytes; it must be a str"),
        (
            FixedEnv("done", 1.0, True, False, {"metrics": {"succes": 1.0}}),
            "metric 'succes' isn't declared.*Did you mean 'success'",
        ),
        (FixedEnv("done", 1.0, 1, False, {}), "terminated is 1; it must be True or False"),
    ],
)
def test_a_broken_contract_names_environment_turn_and_what_is_allowed(env: Env, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        run(lambda _: env, answers("b"))


def test_pictures_reach_the_turn_and_the_message() -> None:
    trajectory, conversation = run(
        lambda _: FrozenLakeEnv(render_mode="rgb_array"), answers(["Up"]), max_steps=1
    )
    [media] = trajectory.turns[0].media
    assert media.data.shape == (128, 128, 3)
    assert conversation.messages[0]["content"][0]["image"] is media.data


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "Lake.max_steps is 0"),
        ({"max_tokens_per_step": 0}, "at least 1"),
        ({"action_pattern": "("}, "action_pattern"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvAgentSettings(tag="Lake", **settings)


class SecondStepHangs(LettersEnv):
    """Its second step never ends: the coroutine waits for ever, or the call blocks."""

    is_blocking = False

    def step(self, action: str) -> Any:
        if self._turn:
            return block_for_ever() if self.is_blocking else asyncio.Event().wait()
        return super().step(action)


class SecondStepBlocks(SecondStepHangs):
    is_blocking = True


@pytest.mark.parametrize("env", [SecondStepHangs, SecondStepBlocks])
def test_an_episode_out_of_time_keeps_the_turns_that_were_answered(env: type[SecondStepHangs]) -> None:
    conversation, calls = (
        ScriptedConversation(["ab", "cd", "ef"]),
        CallSettings(watchdog=Watchdog(poll_s=0.01)),
    )
    settings = EnvAgentSettings(tag="Lake", action_pattern=None, episode_timeout_s=1.0, calls=calls)
    with WatchedRunner(calls.watchdog) as runner:
        [trajectory] = runner.run(
            EnvAgent(lambda _: env(3), settings).run(TASK, 2, lambda *_, **__: conversation, SAMPLING)
        )
    assert (trajectory.status, trajectory.limit, trajectory.score) == ("truncated", "time", 1.0)
    assert trajectory.bootstraps and len(trajectory.turns) == 1 and len(conversation.turns) == 2
    assert trajectory.metrics == {"num_actions": 1.0, "success": 1.0}


def test_an_episode_out_of_time_without_an_answered_turn_fails_by_name() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"waited 0\.02 s for an episode of Lake to end; raise episode_timeout_s"
    ):
        run(lambda _: StuckEnv(how="await"), ["ab"], action_pattern=None, episode_timeout_s=0.02)


def test_a_call_that_hangs_is_a_failure_however_long_the_episode_may_take() -> None:
    calls = CallSettings(timeout_s=0.02)
    with pytest.raises(EnvironmentFault, match="env_step_timeout_s"):
        run(
            lambda _: SecondStepHangs(3),
            ["ab", "cd"],
            action_pattern=None,
            episode_timeout_s=60.0,
            calls=calls,
        )


class LastStepIsLate(LettersEnv):
    """The time is up while its last step, which ends the episode, is running."""

    async def step(self, action: str) -> Any:
        asyncio.get_running_loop().call_later(0, time.sleep, 1.1)
        await asyncio.sleep(0)
        return super().step(action)


def test_what_the_environment_has_ended_is_not_cut_by_time() -> None:
    trajectory, _ = run(lambda _: LastStepIsLate(1), ["ab"], action_pattern=None, episode_timeout_s=1.0)
    assert (trajectory.status, trajectory.limit) == ("finished", None)
