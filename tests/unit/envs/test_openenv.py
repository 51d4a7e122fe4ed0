"""Environments of OpenEnv servers, and ours served: the same episodes over the wire, places, and whose fault
what is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from crude_openenv import SCHEMA, TEXT, crude_server, error, observation
from messages import mentions

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.openenv.env import OpenEnvEnv
from turnwise.envs.openenv.fields import ActionError, action_field, observation_text
from turnwise.envs.registry import make_env
from turnwise.errors import DeadlineError, EnvironmentFault
from turnwise.gateway.openenv_server import OpenEnvServer
from turnwise.runtime.watchdog import Watchdog
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams, Task

MOVES = ("Right", "Down", "Left", "nowhere", "Down", "Right")


async def episode(env: Any, seed: int) -> list[tuple[Any, ...]]:
    """What reset and each step returned, up to the end. Works for coroutines too."""

    async def result(value: Any) -> Any:
        return await value if asyncio.iscoroutine(value) else value

    seen = [(await result(env.reset(seed=seed)))[:1]]
    for move in MOVES:
        step = await result(env.step(move))
        seen.append(step[:3])
        if step[2] or step[3]:
            break
    await result(env.close())
    return seen


async def served(make: Any, **options: Any) -> OpenEnvServer:
    server = OpenEnvServer(make, "Lake", port=0, **options)
    await server.start()
    return server


def test_an_episode_over_the_wire_is_the_one_that_is_played_here() -> None:
    async def play() -> None:
        server = await served(lambda: FrozenLakeEnv(env_instruction=""))
        try:
            for seed in range(4):
                there = await episode(OpenEnvEnv(server.url), seed)
                here = await episode(FrozenLakeEnv(env_instruction=""), seed)
                assert there == here
        finally:
            await server.close()

    asyncio.run(play())


def test_more_episodes_than_places_are_all_played() -> None:
    async def play() -> None:
        server = await served(FrozenLakeEnv, max_sessions=2)
        template = ChatTemplate(byte_tokenizer())
        settings = EnvAgentSettings("Lake", max_steps=3, turn_template="{observation}")
        agent = EnvAgent(lambda _: OpenEnvEnv(server.url), settings)

        async def one(number: int) -> int:
            responses = [template.respond("<answer>Up</answer>")] * 3
            contexts = TokenContexts(template, ScriptedServer(responses), 9000, f"episode {number}")
            task = Task(f"train/Lake/{number}", "Lake", "train", 0)
            [trajectory] = await agent.run(task, 0, contexts, SamplingParams(max_new_tokens=256))
            return len(trajectory.turns)

        try:
            assert await asyncio.gather(*map(one, range(8))) == [3] * 8
        finally:
            await server.close()

    asyncio.run(play())


def test_a_wait_for_a_place_has_a_deadline() -> None:
    async def play(watchdog: Watchdog) -> None:
        async with crude_server({"state": error("CAPACITY_REACHED")}) as url:
            calls = CallSettings(place_timeout_s=0.2, watchdog=watchdog)
            agent = EnvAgent(lambda _: OpenEnvEnv(url), EnvAgentSettings("Lake", calls=calls))
            await agent.run(Task("train/Lake/0", "Lake", "train", 0), 0, None, SamplingParams(8))  # type: ignore[arg-type]

    with Watchdog() as watchdog, pytest.raises(DeadlineError, match=r"deadlines\.env_s"):
        asyncio.run(play(watchdog))


def test_what_the_player_does_wrong_is_shown_and_costs_and_is_not_the_end() -> None:
    refusal = error("VALIDATION_ERROR", errors=[{"loc": ["move"], "msg": "no such move"}])

    async def play() -> None:
        heard: list[Any] = []
        answers = {"reset": observation(), "step": refusal}
        async with crude_server(answers, heard=heard) as url:
            env = OpenEnvEnv(url, observation="{board} at {score}", format_penalty=-0.5)
            assert (await env.reset(seed=7))[0] == "b at 3"
            text, reward, ended, truncated, info = await env.step("up")
            assert mentions(text, "move", "no such move", "b at 3")
            assert (reward, ended, truncated) == (-0.5, False, False)
            assert info["metrics"] == {"action_is_valid": 0.0, "format_penalty": -0.5}
            assert (await env.step(""))[:2] == ("b at 3", -0.5)
            await env.close()
        reset, step = [message for message in heard if message["type"] in ("reset", "step")]
        assert reset["data"]["seed"] == 7 and reset["data"]["episode_id"]
        assert step["data"] == {"move": "up"}

    asyncio.run(play())


HTML = "<html>hello</html>"
TWO = {"properties": {"row": TEXT, "column": TEXT}, "required": ["row", "column"]}


@pytest.mark.parametrize(
    ("answers", "schema", "keys"),
    [
        ({}, HTML, ("/schema", "html")),
        ({}, {"action": 3}, ("/schema",)),
        ({}, {"action": TWO}, ("row, column", "action: json")),
        ({"state": None}, SCHEMA, ("ended the connection",)),
        ({"state": "hello"}, SCHEMA, ("hello",)),
        ({"state": error("FACTORY_ERROR")}, SCHEMA, ("FACTORY_ERROR",)),
        ({"reset": observation(done=True)}, SCHEMA, ("reset", "done")),
        ({"reset": error("EXECUTION_ERROR")}, SCHEMA, ("EXECUTION_ERROR",)),
        ({"reset": {"type": "observation", "data": {"observation": "text"}}}, SCHEMA, ("reset",)),
        ({"reset": observation(), "step": None}, SCHEMA, ("step",)),
        ({"reset": observation(), "step": error("EXECUTION_ERROR")}, SCHEMA, ("EXECUTION_ERROR", "up")),
        ({"reset": observation(), "step": json.dumps(observation(float("nan")))}, SCHEMA, ("reward", "nan")),
        ({"reset": observation(), "step": observation("much")}, SCHEMA, ("reward", "much")),
        ({"reset": observation(), "step": "x" * 17 * 2**20}, SCHEMA, ("16777216",)),
    ],
)
def test_what_the_server_does_wrong_fails_the_episode_and_names_its_url(
    answers: dict[str, Any], schema: Any, keys: tuple[str, ...]
) -> None:
    async def play() -> None:
        async with crude_server(answers, schema) as url:
            env = OpenEnvEnv(url)
            try:
                await env.reset(seed=0)
                await env.step("up")
            except EnvironmentFault as fault:
                assert mentions(str(fault), url, *keys)
            else:
                pytest.fail("it was played")
            finally:
                closing = env.close()
                if closing is not None:
                    await closing

    asyncio.run(play())


def test_nobody_at_the_url_is_said() -> None:
    with pytest.raises(EnvironmentFault, match=r"http://127\.0\.0\.1:9"):
        asyncio.run(OpenEnvEnv("http://127.0.0.1:9").reset(seed=0))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"url": "127.0.0.1:8000"}, "url"),
        ({"url": 8000}, "url"),
        ({"url": "ws://h"}, "url"),
        ({"url": "http://h", "observation": "{a.b}"}, "observation"),
        ({"url": "http://h", "observation": "{"}, "observation"),
        ({"url": "http://h", "observation": "{board:d}"}, "{board}"),
        ({"url": "http://h", "observation": "{board!r}"}, "{board}"),
        ({"url": "http://h", "observation": "{board!z}"}, "{board}"),
        ({"url": "http://h", "action": 3}, "action"),
        ({"url": "http://h", "reset": [1]}, "reset"),
        ({"url": "http://h", "format_penalty": 1.0}, "format_penalty"),
        ({}, "url"),
    ],
)
def test_wrong_arguments_are_said_before_a_server_is_asked(options: dict[str, Any], key: str) -> None:
    with pytest.raises(EnvironmentFault, match=key):
        make_env("openenv", options, "train")


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        (TEXT, "up", "up"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "three", None),
        ({"anyOf": [{"type": "null"}, {"type": "number"}]}, "0.5", 0.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", None),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "1, 2", None),
        ({}, "up", "up"),
    ],
)
def test_the_text_becomes_a_value_of_its_field(field: Any, text: str, value: Any) -> None:
    chosen = action_field(None, {"properties": {"move": field, "metadata": {}}}, "http://h")
    if value is None:
        with pytest.raises(ActionError):
            chosen.action(text)
    else:
        assert chosen.action(text) == {"move": value}


def test_a_whole_action_is_json_and_fields_are_chosen_or_refused() -> None:
    whole = action_field("json", TWO, "http://h")
    assert whole.action('{"row": 1}') == {"row": 1}
    with pytest.raises(ActionError):
        whole.action("[1]")
    for name, key in (("row", "column"), ("rows", "row, column")):
        with pytest.raises(EnvironmentFault, match=key):
            action_field(name, TWO, "http://h")
    optional = {"properties": {"row": TEXT, "column": TEXT}, "required": []}
    assert action_field("column", optional, "http://h").action("2") == {"column": "2"}


def test_an_observation_is_its_template_its_text_or_json() -> None:
    schema = SCHEMA["observation"]
    fields = {"board": "X", "score": 3, "metadata": {"a": 1}}
    assert observation_text(None, schema, "http://h").text(fields) == "X"
    assert observation_text("{score}: {board}", schema, "http://h").text(fields) == "3: X"
    assert observation_text(None, {}, "http://h").text(fields) == '{"board": "X", "score": 3}'
    with pytest.raises(EnvironmentFault, match="boards"):
        observation_text("{boards}", schema, "http://h")


class Truncated(FrozenLakeEnv):
    def step(self, action: str) -> Any:
        if action == "break":
            raise RuntimeError("it is broken")
        text, reward, _, _, info = super().step(action)
        return text, reward, False, True, info


def test_the_routes_of_a_served_environment() -> None:
    import aiohttp

    async def talk() -> None:
        server = await served(lambda: Truncated(env_instruction="Walk."))
        try:
            async with aiohttp.ClientSession(server.url) as client:
                assert (await (await client.get("/health")).json())["status"] == "healthy"
                assert (await (await client.get("/metadata")).json())["name"] == "Lake"
                assert (await (await client.get("/schema")).json())["action"]["required"] == ["action"]
                begun = await (await client.post("/reset", json={"seed": 3})).json()
                assert begun["observation"]["text"].startswith("Walk.") and not begun["done"]
                played = await (await client.post("/step", json={"action": {"action": "Up"}})).json()
                assert played["done"] and played["metadata"]["truncated"]
                assert (await (await client.get("/state")).json())["step_count"] == 1
                assert (await client.post("/step", json={"action": {"action": "Up"}})).status == 500
                assert (await client.post("/step", json={"action": {"move": "Up"}})).status == 422
                as_json = {"Content-Type": "application/json"}
                assert (await client.post("/reset", data="{", headers=as_json)).status == 422
                assert (await client.post("/reset")).status == 200
                codes = []
                async with client.ws_connect("/ws") as socket:
                    for text in (
                        "{",
                        '{"type": "fly"}',
                        '{"type": "step", "data": {"action": "Up"}}',
                        '{"type": "reset", "data": {"seed": -1}}',
                        '{"type": "reset", "data": {}}',
                        '{"type": "step", "data": {"action": 3}}',
                        '{"type": "step", "data": {"action": "break"}}',
                        '{"type": "step", "data": {"action": "Up"}}',
                    ):
                        await socket.send_str(text)
                        reply = await socket.receive_json()
                        codes.append(reply["data"].get("code", reply["type"]))
                assert codes == [
                    "INVALID_JSON",
                    "UNKNOWN_TYPE",
                    "EXECUTION_ERROR",
                    "VALIDATION_ERROR",
                    "observation",
                    "VALIDATION_ERROR",
                    "EXECUTION_ERROR",
                    "observation",
                ]
        finally:
            await server.close()

    asyncio.run(talk())
