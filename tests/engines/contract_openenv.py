"""OpenEnv itself: a server of its own is played by ours, its client plays what we serve, and its
TrainingTrace takes what `turnwise convert` writes.

Runs in the environment of openenv: `python contract_openenv.py MODEL`. As `python contract_openenv.py serve
PORT` it is the server.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

NUM_PLACES, NUM_EPISODES, STEPS = 4, 64, 3
START_S = 60.0


def serve(port: int) -> None:
    """A game in OpenEnv's own classes: the player is told a number, and answers with the next one."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Shown(Observation):
        text: str

    class Next(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()
            self._number = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:
            self._number = (seed or 0) % 10
            self._state = State(episode_id=episode_id, step_count=0)
            return Shown(text=f"{self._number}", done=False, reward=None)

        def step(self, action: Guess, **_: Any) -> Shown:
            if action.number == 99:
                raise RuntimeError("99 breaks it")
            is_right = action.number == self._number + 1
            self._number = action.number
            self._state.step_count += 1
            is_over = self._state.step_count == STEPS
            return Shown(text=f"{self._number}", done=is_over, reward=float(is_right) / STEPS)

        @property
        def state(self) -> State:
            return self._state

    app = create_app(Next, Guess, Shown, max_concurrent_envs=NUM_PLACES)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


@contextmanager
def started(*command: str, url: str) -> Iterator[None]:
    """A process that answers at `url`/health, and is ended afterwards."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, f"no answer within {START_S:g} s"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def played(url: str, number: int) -> float:
    from turnwise.envs.openenv.env import OpenEnvEnv

    env = OpenEnvEnv(url)
    await env.wait_for_place()
    text, _ = await env.reset(seed=number)
    assert text == str(number % 10), text
    shown, reward, _, _, info = await env.step("seven")  # no whole number: the player's fault
    assert reward == 0 and not info["metrics"]["action_is_valid"] and text in shown
    score = 0.0
    for _ in range(STEPS):
        text, reward, is_over, is_truncated, _ = await env.step(str(int(text) + 1))
        score += reward
    assert is_over and not is_truncated
    await env.close()
    return score


async def play_theirs(url: str) -> None:
    from turnwise.envs.openenv.env import OpenEnvEnv
    from turnwise.errors import EnvironmentFault

    scores = await asyncio.gather(*(played(url, number) for number in range(NUM_EPISODES)))
    assert all(abs(score - 1) < 1e-9 for score in scores), scores
    env = OpenEnvEnv(url, action="json", observation="<{text}>")
    assert (await env.reset(seed=3))[0] == "<3>"
    shown, *_, info = await env.step('{"number": "many"}')  # their pydantic refuses it: VALIDATION_ERROR
    assert "VALIDATION_ERROR" in shown and not info["metrics"]["action_is_valid"], shown
    try:
        await env.step('{"number": 99}')
    except EnvironmentFault as fault:
        assert "99 breaks it" in str(fault) and url in str(fault)
    else:
        raise AssertionError("an error of their environment must fail the episode")
    await env.close()


def play_ours(url: str) -> None:
    """Their client plays FrozenLake."""
    from openenv.core.generic_client import GenericEnvClient

    with GenericEnvClient(base_url=url).sync() as client:
        begun = client.reset(seed=3)
        assert "P" in begun.observation["text"] and not begun.done
        for _ in range(20):
            result = client.step({"action": "Up"})
            assert isinstance(result.reward, int | float)
            if result.done:
                break


def trace_theirs(model: str, folder: Path) -> None:
    """Their TrainingTrace reads what a run's rollouts are converted into."""
    from openenv.core.harness.training import TrainingTrace

    from turnwise.cli.main import main

    config = {
        "pretrain": model,
        "output_dir": str(folder / "runs"),
        "exp_name": "letters",
        "max_steps": 1,
        "save_steps": 0,
        "sequence_length": 384,
        "rollout_batch_size": 4,
        "track_with": [],
        "train_env_manager": {"num_env_groups": 1, "group_size": 4},
        "custom_envs": {"Toy": {"env_type": "toy_envs:LettersEnv", "max_steps": 3, "max_tokens_per_step": 4}},
    }
    (folder / "letters.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "letters.yaml")]) == 0
    [rollouts] = (folder / "runs").glob("letters/*/rollouts.jsonl")
    traces, theirs, back = folder / "traces.json", folder / "theirs.json", folder / "back.jsonl"
    assert main(["convert", str(rollouts), str(traces)]) == 0
    read = [TrainingTrace.model_validate_json(line) for line in traces.read_text().splitlines()]
    assert len(read) == 4 and max(len(trace.turns) for trace in read) > 1
    theirs.write_text("".join(trace.model_dump_json() + "\n" for trace in read))
    assert main(["convert", str(theirs), str(back)]) == 0
    assert [json.loads(line) for line in back.read_text().splitlines()] == [
        json.loads(line) for line in rollouts.read_text().splitlines()
    ]


def main(model: str) -> None:
    here = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with started(here, "serve", str(port), url=url):
            asyncio.run(play_theirs(url))
        config = folder / "lake.yaml"
        config.write_text("custom_envs: {Lake: {env_type: frozen_lake}}\n")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = "import sys; from turnwise.cli.main import main; sys.exit(main())"
        words = ("-c", command, "serve-env", str(config), "Lake", "--port", str(port))
        with started(*words, url=url):
            play_ours(url)
        trace_theirs(model, folder)
    print(f"{NUM_EPISODES} episodes over {NUM_PLACES} places of OpenEnv's server, ours by its client")
    print("its TrainingTrace reads what we write, and is read")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        main(sys.argv[1])
