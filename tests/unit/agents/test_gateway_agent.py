"""Episodes that functions and commands play over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import urllib.error
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import TASK, command_player, function_player, play_episodes
from http_players import post, two_turns

from turnwise.agents.played_function import StuckThreads
from turnwise.agents.seat import outcome_of_line, read_outcome
from turnwise.envs.base import TextEnv
from turnwise.errors import (
    DeadlineError,
    EnvironmentFault,
    ReplicasDeadError,
    RolloutError,
    ServerError,
)
from turnwise.types import Task

ASK = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}
CLIENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


class UnknownTool(Exception):
    """What a framework raises where the model calls a tool that isn't there."""


def ask(base_url: str, api_key: str, text: str = "go", **fields: Any) -> Any:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}], **fields}
    return post(base_url, api_key, body)["choices"][0]["message"]["content"]


def test_many_blocking_functions_play_at_once_and_hold_up_nobody() -> None:
    player = function_player(two_turns, "model")
    trajectories = play_episodes(player, lambda number: f"reply {number % 2}", num_episodes=16)
    assert [t.answer for t in trajectories] == ["reply 1"] * 16
    assert all(len(t.samples) == 1 and len(t.turns) == 2 for t in trajectories)
    assert all(t.status == "finished" and t.answer_turn == 1 for t in trajectories)
    assert all(t.metrics["gateway/delivered"] == 2 for t in trajectories)


def test_an_async_function_has_a_loop_of_its_own() -> None:
    async def play(base_url: str, api_key: str, task: dict[str, Any]) -> float:
        await asyncio.gather(*(asyncio.to_thread(ask, base_url, api_key, text) for text in "ab"))
        return 0.5

    [trajectory] = play_episodes(function_player(play), ["x", "y"])
    assert trajectory.score == 0.5
    assert trajectory.final_text in ("x", "y") and len(trajectory.samples) == 2


def test_what_a_function_is_told() -> None:
    told: dict[str, Any] = {}

    def play(base_url: str, api_key: str, task: dict[str, Any], model: str, workdir: str) -> dict[str, Any]:
        told.update(task, model=model, files=os.listdir(workdir), workdir=workdir)
        (Path(workdir) / "file").write_text("x")
        ask(base_url, api_key)
        return {"answer": "4", "score": True, "metrics": {"steps": 3}}

    [trajectory] = play_episodes(function_player(play, "model", "workdir"), ["x"])
    assert {name: told[name] for name in ("id", "split", "seed", "prompt", "answer", "model", "files")} == {
        "id": TASK.id,
        "split": "train",
        "seed": 7,
        "prompt": "go",
        "answer": "left",
        "model": "policy",
        "files": [],
    }
    assert not Path(told["workdir"]).exists()
    assert (trajectory.final_text, trajectory.score, trajectory.metrics["steps"]) == ("4", 1.0, 3.0)


def test_what_a_function_does_to_its_task_is_seen_by_nobody_else() -> None:
    task = replace(TASK, payload={"prompt": [{"role": "user", "content": "go"}]})

    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        messages = task["prompt"]
        for _ in range(2):
            body = {"model": "policy", "messages": messages}
            messages.append(post(base_url, api_key, body)["choices"][0]["message"])
            messages.append({"role": "user", "content": "again"})

    trajectories = play_episodes(function_player(play), lambda number: "x", num_episodes=3, task=task)
    assert [len(trajectory.samples) for trajectory in trajectories] == [1, 1, 1]
    assert len(task.payload["prompt"]) == 1


@pytest.mark.parametrize("fault", [ReplicasDeadError("all dead"), DeadlineError("too late")])
def test_what_ends_the_run_isn_t_the_client_s_error(fault: Exception) -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        ask(base_url, api_key)

    with pytest.raises(type(fault), match=str(fault)):
        play_episodes(function_player(play), [], fault=fault)


def test_a_server_s_fault_is_the_client_s_and_fails_the_episode() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        ask(base_url, api_key)

    with pytest.raises(urllib.error.HTTPError, match="no such token"):
        play_episodes(function_player(play), [], fault=ServerError("no such token"))


def test_a_command_plays_with_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    code = CLIENT + (
        "text = ask(task['prompt'])\n"
        "print('chatter')\n"
        "names = sorted(os.environ)\n"
        "print(json.dumps({'answer': text + ' ' + ' '.join(names), 'score': 2}))\n"
    )
    [trajectory] = play_episodes(command_player(code, MORE="1"), ["left"])
    text, *names = trajectory.final_text.split()
    assert (text, trajectory.score) == ("left", 2.0)
    expected = {"PATH", "HOME", "MORE", "LC_CTYPE"}
    expected |= {f"OPENAI_{name}" for name in ("BASE_URL", "API_KEY", "MODEL")}
    expected |= {f"ANTHROPIC_{name}" for name in ("BASE_URL", "API_KEY", "MODEL")}
    assert set(names) <= expected and "SECRET" not in names and "MORE" in names


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import sys; sys.stderr.write('no luck'); sys.exit(3)", "no luck"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("print('ok')", "without a request"),
    ],
)
def test_a_command_that_fails(code: str, sentence: str) -> None:
    with pytest.raises(EnvironmentFault, match=sentence):
        play_episodes(command_player(code), ["x"])


def test_a_command_that_is_not_there() -> None:
    player = command_player("")
    missing = type(player)(["/no/such/program"], "agent.command", {}, 0.1)  # type: ignore[call-arg]
    with pytest.raises(EnvironmentFault, match="can't be started"):
        play_episodes(missing, ["x"])


def test_a_command_that_writes_much_and_leaves_a_child_behind(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = CLIENT + (
        "import subprocess\n"
        f"subprocess.Popen([sys.executable, '-c', \"import time, os; open({str(child)!r}, 'w')"
        '.write(str(os.getpid())); time.sleep(600)"])\n'
        f"import time\nwhile not os.path.exists({str(child)!r}): time.sleep(0.01)\n"
        "ask('go')\n"
        "for _ in range(30): print('x' * 1_000_000)\n"
        "print('left')\n"
    )
    [trajectory] = play_episodes(command_player(code), ["x"])
    assert trajectory.final_text == "left"
    assert _ends(int(child.read_text()))


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = CLIENT + (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nask('go')\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    [trajectory] = play_episodes(command_player(code), ["x"], episode_timeout_s=3.0)
    assert (trajectory.status, trajectory.limit) == ("truncated", "time")
    assert _ends(int(pid.read_text()))


def _ends(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    for _ in range(500):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_an_exception_fails_the_episode() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        ask(base_url, api_key)
        raise UnknownTool("add2")

    with pytest.raises(UnknownTool):
        play_episodes(function_player(play), ["x"])


def test_a_function_that_asks_for_nothing_fails_its_episode() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> str:
        return "an answer"

    with pytest.raises(EnvironmentFault, match="without a request"):
        play_episodes(function_player(play), ["x"])


def test_a_mistake_of_the_model_ends_the_episode_with_its_reward() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        ask(base_url, api_key)
        raise UnknownTool("add2")

    mistakes = {"mistakes": (UnknownTool,), "mistake_reward": -1.0}
    [trajectory] = play_episodes(function_player(play), ["x"], **mistakes)
    assert (trajectory.status, trajectory.score, trajectory.metrics["mistakes"]) == ("finished", -1.0, 1.0)
    assert trajectory.turns[0].is_trained


def test_an_episode_that_only_its_player_scores_needs_a_score() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> float | None:
        ask(base_url, api_key)
        return task.get("score")

    [trajectory] = play_episodes(
        function_player(play), ["x"], task=replace(TASK, payload={"score": 0.5}), needs_score=True
    )
    assert trajectory.score == 0.5
    with pytest.raises(EnvironmentFault, match=r"data\.reward"):
        play_episodes(function_player(play), ["x"], needs_score=True)


def test_a_limit_explains_the_exception_after_it() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        for text in "abc":
            ask(base_url, api_key, text)

    [trajectory] = play_episodes(function_player(play), lambda number: "x", max_turns=2)
    assert (trajectory.status, trajectory.limit, len(trajectory.turns)) == ("truncated", "max_steps", 2)
    assert trajectory.metrics["gateway/refused"] == 1


def test_a_limit_explains_a_mistake_after_it() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        try:
            for text in "abc":
                ask(base_url, api_key, text)
        except Exception as fault:
            raise UnknownTool("add2") from fault

    mistakes = {"mistakes": (UnknownTool,), "mistake_reward": -1.0}
    [trajectory] = play_episodes(function_player(play), lambda number: "x", max_turns=2, **mistakes)
    assert (trajectory.status, trajectory.limit, trajectory.score) == ("truncated", "max_steps", 0.0)


def test_a_first_prompt_that_is_too_long_is_no_failure_that_is_tried_again() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        ask(base_url, api_key, "a" * 300)

    with pytest.raises(RolloutError, match="sequence_length"):
        play_episodes(function_player(play), ["x"], sequence_length=64)


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (lambda: sys.exit(3), "sys.exit"),
        (lambda: float("nan"), "finite"),
        (lambda: [1], "returned a list"),
        (lambda: {"reward": 1}, "reward"),
        (lambda: {"answer": 4}, "answer"),
        (lambda: {"metrics": {"a": "b"}}, "'a'"),
    ],
)
def test_a_function_that_ends_badly_fails_its_own_episode(end: Any, sentence: str) -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any]) -> Any:
        ask(base_url, api_key)
        return end()

    with pytest.raises(EnvironmentFault, match=sentence):
        play_episodes(function_player(play), ["x"])


def test_a_function_whose_time_is_up_is_truncated_and_its_client_fails_fast() -> None:
    seen: list[int] = []

    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        try:
            for number in range(10**6):
                ask(base_url, api_key, str(number))
        except urllib.error.HTTPError as error:
            seen.append(error.code)
            raise

    [trajectory] = play_episodes(function_player(play), lambda number: "x", episode_timeout_s=1.0)
    assert (trajectory.status, trajectory.limit, seen) == ("truncated", "time", [410])
    assert trajectory.metrics["gateway/delivered"] > 0


def test_threads_that_stay_are_left_behind_and_too_many_end_the_run() -> None:
    release = threading.Event()
    stuck = StuckThreads()

    def play(base_url: str, api_key: str, task: dict[str, Any]) -> None:
        ask(base_url, api_key)
        release.wait(60)

    player = function_player(play, stuck=stuck)
    try:
        played = play_episodes(player, ["x"], num_episodes=17, episode_timeout_s=2.0)
        assert {trajectory.limit for trajectory in played} == {"time"}
        with pytest.raises(DeadlineError, match="grace_s"):
            play_episodes(player, ["x"])
    finally:
        release.set()


class Guess(TextEnv):
    """Rewards the word `left`."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"guess {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", float(action == "left"), action == "left", False, {}


GUESS: dict[str, Any] = {"make_env": lambda task: Guess(), "task": Task("train/G/0", "G", "train", 7)}


def test_a_function_plays_an_environment_whose_rewards_go_to_the_newest_response() -> None:
    seen: list[Any] = []

    async def play(base_url: str, api_key: str, task: dict[str, Any], env: Any) -> None:
        seen.append((task["prompt"], env.observation))
        for step in (env.step, env.astep):
            text = await asyncio.to_thread(ask, base_url, api_key, env.observation)
            result = step(text)
            if asyncio.iscoroutine(result):
                result = await result
            seen.append(result)

    [trajectory] = play_episodes(function_player(play, "env"), ["right", "left"], max_steps=4, **GUESS)
    assert seen[0] == ("guess 7", "guess 7")
    assert (seen[1].observation, seen[1].reward, seen[1].terminated) == ("you said right", 0.0, False)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert (trajectory.score, trajectory.status, trajectory.metrics["env_steps"]) == (1.0, "finished", 2.0)


def test_an_environment_s_last_step_is_a_limit() -> None:
    def play(base_url: str, api_key: str, task: dict[str, Any], env: Any) -> None:
        while True:
            env.step(ask(base_url, api_key, env.observation))

    [trajectory] = play_episodes(function_player(play, "env"), lambda n: f"no{n}", max_steps=3, **GUESS)
    assert (trajectory.limit, len(trajectory.turns)) == ("max_steps", 4)


def test_outcomes() -> None:
    assert read_outcome(None, "f").answer is None
    assert outcome_of_line('{"broken', "c").answer == '{"broken'
    assert outcome_of_line(json.dumps({"answer": "a", "score": 1}), "c").score == 1.0
    with pytest.raises(EnvironmentFault):
        outcome_of_line('{"score": NaN}', "c")
