"""The official client of OpenAI against the gateway, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import TASK, command_player, function_player, play_episodes
from scripted_gateway import Scripted, scripted_gateway

from turnwise.tools.calculator import calculator
from turnwise.tools.function_tool import FunctionTool

openai = pytest.importorskip("openai")

USER: Any = {"role": "user", "content": "go"}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def client_of(scripted: Scripted, kind: Any = None, **options: Any) -> Any:
    options = {"max_retries": 0, **options}
    url = scripted.gateway.url + "/v1"
    return (kind or openai.OpenAI)(base_url=url, api_key=scripted.session.key, **options)


def test_a_conversation_with_tools_that_sends_message_objects_back() -> None:
    def converse(client: Any) -> Any:
        with client:
            messages = [USER]
            first = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = first.choices[0].message
            [call] = message.tool_calls
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
            return client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)

    async def play() -> Any:
        async with scripted_gateway([f"<think>\nhm\n</think>\n\nsee {CALL}", "2"]) as scripted:
            answer = await asyncio.to_thread(converse, client_of(scripted))
            return answer.choices[0].message.content, scripted.trajectory()

    text, trajectory = asyncio.run(play())
    assert text == "2" and len(trajectory.samples) == 1


def test_streams_and_parallel_requests_of_the_async_client() -> None:
    async def streamed(client: Any, text: str) -> str:
        stream = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def play() -> Any:
        async with scripted_gateway(lambda number: f"reply {number}") as scripted:
            async with client_of(scripted, openai.AsyncOpenAI) as client:
                texts = await asyncio.gather(*(streamed(client, text) for text in "abc"))
            return sorted(texts), scripted.trained_turns()

    assert asyncio.run(play()) == (["reply 0", "reply 1", "reply 2"], [0, 1, 2])


def test_a_client_whose_time_is_up_sends_its_request_again_and_gets_the_same_answer() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left", "right"]) as scripted:
            scripted.server.gate.clear()
            async with client_of(scripted, openai.AsyncOpenAI, timeout=1.0, max_retries=9) as client:
                asking = asyncio.ensure_future(
                    client.chat.completions.create(model="policy", messages=[USER])
                )
                await asyncio.sleep(1.2)
                scripted.server.gate.set()
                answer = await asking
            return answer.choices[0].message.content, scripted.trained_turns()

    assert asyncio.run(play()) == ("left", [0])


def test_errors_and_how_often_the_client_asks() -> None:
    async def play() -> Any:
        async with scripted_gateway(["left"]) as scripted:
            async with client_of(scripted, openai.AsyncOpenAI, max_retries=2) as client:
                with pytest.raises(openai.NotFoundError) as unknown:
                    await client.chat.completions.create(model="gpt-4o", messages=[USER])
                await scripted.sessions.end(scripted.session)
                with pytest.raises(openai.APIStatusError) as ended:
                    await client.chat.completions.create(model="policy", messages=[USER])
            return unknown.value, ended.value, scripted.session.counts["refused"]

    unknown, ended, num_refused = asyncio.run(play())
    assert unknown.code == "model_not_found" and "agent.models" in unknown.message
    assert (ended.status_code, num_refused) == (410, 1)


def test_a_stream_that_fails_raises_in_the_client() -> None:
    async def play() -> None:
        async with scripted_gateway([]) as scripted:
            scripted.server.gate.clear()
            async with client_of(scripted, openai.AsyncOpenAI) as client:
                stream = await client.chat.completions.create(model="policy", messages=[USER], stream=True)
                await scripted.sessions.end(scripted.session)
                async for _ in stream:
                    pass

    with pytest.raises(openai.APIError):
        asyncio.run(play())


def test_the_example_s_tool_is_the_one_of_the_demonstrations() -> None:
    examples = Path(__file__).parents[3] / "examples" / "gateway"
    schema = FunctionTool(calculator).schema
    for name in ("with_openai", "as_command"):
        script = runpy.run_path(str(examples / f"{name}.py"))
        assert json.dumps(script["CALCULATOR"]) == json.dumps(schema)
        assert script["multiplied"]('{"expression": "12 * 34"}') == "408"


def test_the_example_plays_a_row() -> None:
    examples = Path(__file__).parents[3] / "examples" / "gateway"
    play = runpy.run_path(str(examples / "with_openai.py"))["play"]
    asked = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
    task = replace(TASK, payload={"prompt": [{"role": "user", "content": "12 * 34"}]})
    [trajectory] = play_episodes(function_player(play, "model"), [asked, "#### 408"], task=task)
    assert trajectory.final_text == "#### 408" and len(trajectory.samples) == 1
    assert trajectory.turns[0].tool_results == ("408",)


def test_the_command_s_example_plays_a_row() -> None:
    script = Path(__file__).parents[3] / "examples" / "gateway" / "as_command.py"
    asked = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
    task = replace(TASK, payload={"prompt": [{"role": "user", "content": "12 * 34"}]})
    player = command_player(script.read_text())
    [trajectory] = play_episodes(player, [asked, "#### 408"], task=task)
    assert trajectory.answer == "#### 408" and len(trajectory.samples) == 1
