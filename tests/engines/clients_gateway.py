"""Real clients of OpenAI and Anthropic, and OpenAI's Agents SDK, talk to the gateway on loopback. They parse
its answers, its events and its errors, and what they send back continues the contexts.

Clients run in threads of their own, as in an agent, so that they may block."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import anthropic
import openai
import pydantic
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_default_openai_client
from gateway_players import SUM_PARENTS, SUMS, Addresses, call, played
from scripted_gateway import SETTINGS

from turnwise.errors import ServerError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def openai_tools() -> None:
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}

    def play(addresses: Addresses) -> Any:
        client = openai.OpenAI(api_key=addresses.key, base_url=addresses.openai)
        items: list[Any] = [{"role": "user", "content": "go"}]
        response = None
        for _ in SUMS:
            response = client.responses.create(model="policy", input=items, tools=[tool], store=False)  # type: ignore[list-item]
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for item in calls:
                total = sum(json.loads(item.arguments).values())
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": str(total)})
        return response

    response = played(SUMS, play, SUM_PARENTS)
    assert response.output_text == "It is 10." and response.usage.input_tokens_details.cached_tokens > 0


def openai_streams() -> None:
    def play(addresses: Addresses) -> Any:
        client = openai.OpenAI(api_key="unused", base_url=addresses.with_key)
        tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
        with client.responses.stream(model="policy", input="go", tools=[tool]) as stream:
            kinds = [event.type for event in stream]
            return kinds, stream.get_final_response()

    kinds, response = played(SUMS[:1], play, [None])
    assert kinds[-1] == "response.completed"
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output_text == "Let me see."


def openai_errors() -> None:
    def play(addresses: Addresses) -> Any:
        client = openai.OpenAI(api_key=addresses.key, base_url=addresses.openai, max_retries=0)
        faults: list[Any] = []
        wrong: list[dict[str, Any]] = [
            {"model": "policy", "input": "go", "previous_response_id": "resp_1"},
            {"model": "policy", "input": "go", "background": True},
            {"model": "other", "input": "go"},
        ]
        for request in wrong:
            try:
                client.responses.create(**request)
            except openai.APIStatusError as fault:
                faults.append(fault)
        try:
            openai.OpenAI(api_key="no", base_url=addresses.openai).responses.create(
                model="policy", input="go"
            )
        except openai.AuthenticationError as fault:
            faults.append(fault)
        return [(fault.status_code, fault.code) for fault in faults]

    assert played([], play, []) == [
        (400, "invalid_request"),
        (400, "invalid_request"),
        (404, "model_not_found"),
        (401, "invalid_api_key"),
    ]


def broken_streams() -> None:
    """Sampling fails after the headers and some comments were sent."""

    def of_openai(addresses: Addresses) -> Any:
        client = openai.OpenAI(api_key=addresses.key, base_url=addresses.openai, max_retries=0)
        list(client.responses.create(model="policy", input="go", stream=True))

    def of_chat(addresses: Addresses) -> Any:
        client = openai.OpenAI(api_key=addresses.key, base_url=addresses.openai, max_retries=0)
        messages: Any = [{"role": "user", "content": "go"}]
        list(client.chat.completions.create(model="policy", messages=messages, stream=True))

    def of_anthropic(addresses: Addresses) -> Any:
        client = anthropic.Anthropic(api_key=addresses.key, base_url=addresses.anthropic, max_retries=0)
        with client.messages.stream(**anthropic_request()) as stream:
            list(stream)

    def fail(number: int) -> str:
        raise ServerError("the engine broke")

    for play, error in (
        (of_openai, openai.APIError),
        (of_chat, openai.APIError),
        (of_anthropic, anthropic.APIError),
    ):
        try:
            played(fail, play, [], held_s=0.3)
        except error as fault:
            assert "the engine broke" in str(fault) and SETTINGS.keep_alive_s < 0.3
            continue
        raise AssertionError(f"{play.__name__}: a stream that failed counted as a whole answer")


def anthropic_request(**fields: Any) -> dict[str, Any]:
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": "go"}]
    request = {
        "model": "claude-x",
        "max_tokens": 400,
        "system": "Be brief.",
        "messages": messages,
        "tools": [tool],
    }
    return {**request, **fields}


def anthropic_tools() -> None:
    def play(addresses: Addresses) -> Any:
        client = anthropic.Anthropic(api_key=addresses.key, base_url=addresses.anthropic)
        request = anthropic_request()
        counted = client.messages.count_tokens(
            model="claude-x", system="Be brief.", messages=request["messages"], tools=request["tools"]
        )
        answers = []
        for number in range(len(SUMS)):
            if number % 2:
                answers.append(client.messages.create(**request))
            else:
                with client.messages.stream(**request) as stream:
                    answers.append(stream.get_final_message())
            blocks = answers[-1].content
            request["messages"].append({"role": "assistant", "content": blocks})
            results = []
            for block in blocks:
                if block.type == "tool_use":
                    total = str(sum(block.input.values()))
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": total})
            if results:
                request["messages"].append({"role": "user", "content": results})
        return counted.input_tokens, answers

    counted, answers = played(SUMS, play, SUM_PARENTS)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in answers[0].content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answers[0].usage.input_tokens == counted and answers[1].usage.cache_read_input_tokens > 0
    assert answers[-1].content[0].text == "It is 10."


def anthropic_errors() -> None:
    def play(addresses: Addresses) -> Any:
        client = anthropic.Anthropic(api_key=addresses.key, base_url=addresses.anthropic, max_retries=0)
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        faults: list[Any] = []
        for fields in ({"messages": [{"role": "user", "content": [image]}]}, {"model": "other"}):
            try:
                client.messages.create(**anthropic_request(**fields))
            except anthropic.APIStatusError as fault:
                faults.append(type(fault))
        return faults

    assert played([], play, []) == [anthropic.BadRequestError, anthropic.NotFoundError]


@asynccontextmanager
async def default_client(addresses: Addresses) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of all agents, also of those that are tools."""
    async with openai.AsyncOpenAI(api_key=addresses.key, base_url=addresses.openai) as client:
        set_default_openai_client(client, use_for_tracing=False)
        yield client


def final_output(agent: Agent[Any], text: str, addresses: Addresses) -> Any:
    async def run() -> Any:
        async with default_client(addresses):
            return (await Runner.run(agent, text)).final_output

    return asyncio.run(run())


def agents_tools() -> None:
    """The SDK's own default is `/v1/responses`."""
    agent = Agent(name="a", instructions="Be brief.", tools=[add], model="policy")

    def play(addresses: Addresses) -> Any:
        return final_output(agent, "what is it?", addresses)

    assert played(SUMS, play, SUM_PARENTS) == "It is 10."


def agents_streamed() -> None:
    agent = Agent(name="a", instructions="Be brief.", tools=[add], model="policy")

    async def stream(addresses: Addresses) -> Any:
        async with default_client(addresses):
            result = Runner.run_streamed(agent, "what is it?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    assert played(SUMS, lambda addresses: asyncio.run(stream(addresses)), SUM_PARENTS) == "It is 10."


def agents_chat() -> None:
    """Its chat model drops the thinking."""

    async def run(addresses: Addresses) -> Any:
        async with default_client(addresses) as client:
            model = OpenAIChatCompletionsModel("policy", openai_client=client)
            agent = Agent(name="a", instructions="Be brief.", tools=[add], model=model)
            return (await Runner.run(agent, "what is it?")).final_output

    assert played(SUMS, lambda addresses: asyncio.run(run(addresses)), SUM_PARENTS) == "It is 10."


def agents_hand_off() -> None:
    """An agent as a tool has a conversation of its own; after a hand-off the system prompt is another one."""
    replies = [call("ask_b", input="help"), "B says 5.", call("transfer_to_c"), "C is done."]

    def play(addresses: Addresses) -> Any:
        asked = Agent(name="b", instructions="You are B", model="policy")
        last = Agent(name="c", instructions="You are C", model="policy")
        tools: Any = [asked.as_tool("ask_b", "Asks b.")]
        first = Agent(name="a", instructions="You are A", model="policy", tools=tools, handoffs=[last])
        return final_output(first, "go", addresses)

    assert played(replies, play, [None, None, 0, None]) == "C is done."


def agents_output_type() -> None:
    class Total(pydantic.BaseModel):
        total: int

    def play(addresses: Addresses) -> Any:
        agent = Agent(name="a", instructions="i", model="policy", output_type=Total)
        return final_output(agent, "go", addresses)

    assert played(['{"total": 10}'], play, [None]) == Total(total=10)


CHECKS = (
    openai_tools,
    openai_streams,
    openai_errors,
    broken_streams,
    anthropic_tools,
    anthropic_errors,
    agents_tools,
    agents_streamed,
    agents_chat,
    agents_hand_off,
    agents_output_type,
)


def main() -> None:
    assert Path(openai.__file__).parts[-4] != "turnwise"
    for check in CHECKS:
        check()
        print(f"clients: {check.__name__}", flush=True)


if __name__ == "__main__":
    main()
