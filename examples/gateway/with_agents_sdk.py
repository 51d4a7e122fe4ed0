"""The same agent as with_openai.py, by the OpenAI Agents SDK: it makes the requests and calls the tool.

An unknown tool raises ModelBehaviorError, which is the model's mistake and not a failure: agents_sdk.yaml
says so in `agent.mistakes`."""

from __future__ import annotations

import os
from typing import Any

import httpx
from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from with_openai import CALCULATOR, MAX_REQUESTS, multiplied

# The SDK would send traces to OpenAI.
os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

CERTIFICATES = httpx.create_ssl_context()
"""To read them takes as much processor time as ten requests. A client belongs to the event loop of its
episode, so episodes share these alone."""


async def compute(context: Any, arguments: str) -> str:
    return multiplied(arguments)


def calculator() -> FunctionTool:
    """The tool, with the schema that the model has seen in its demonstrations."""
    function = CALCULATOR["function"]
    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=compute,
        strict_json_schema=False,
    )


async def play(base_url: str, api_key: str, task: dict[str, Any], model: str) -> None:
    """Plays one row of examples/products. Its last response is scored by `data.reward`."""
    http_client = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        chat = OpenAIChatCompletionsModel(model=model, openai_client=client)
        agent = Agent(name="calculating", model=chat, tools=[calculator()])
        await Runner.run(agent, list(task["prompt"]), max_turns=MAX_REQUESTS)
