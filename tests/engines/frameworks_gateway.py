"""Agent frameworks play an episode each through the gateway, against a scripted model: the contexts are those
of the table in the design of the conversation tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["PYDANTIC_AI_NO_UPDATE_CHECK"] = "1"

import smolagents
from gateway_players import SUM_PARENTS, SUMS, Addresses, call, played
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from pydantic import SecretStr
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 10"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def pydantic_ai() -> None:
    """It sends the thinking back. In Anthropic's protocol it puts thinking without a signature into a user's
    message, so an answer with thinking isn't continued there."""

    def play(model: Callable[[Addresses], Any]) -> Callable[[Addresses], Any]:
        def run(addresses: Addresses) -> Any:
            agent = Agent(model(addresses), system_prompt="Be brief.", tools=[add])
            return agent.run_sync("what is it?").output

        return run

    def provider(addresses: Addresses) -> OpenAIProvider:
        return OpenAIProvider(base_url=addresses.openai, api_key=addresses.key)

    def of_anthropic(addresses: Addresses) -> AnthropicModel:
        provider = AnthropicProvider(base_url=addresses.anthropic, api_key=addresses.key)
        return AnthropicModel("claude-x", provider=provider)

    def of_chat(addresses: Addresses) -> OpenAIChatModel:
        return OpenAIChatModel("policy", provider=provider(addresses))

    def of_responses(addresses: Addresses) -> OpenAIResponsesModel:
        return OpenAIResponsesModel("policy", provider=provider(addresses))

    assert played(SUMS, play(of_chat), SUM_PARENTS) == "It is 10."
    assert played(SUMS, play(of_responses), SUM_PARENTS) == "It is 10."
    assert played(SUMS, play(of_anthropic), [None, None, 1]) == "It is 10."


def langchain_openai() -> None:
    """Its chat drops the thinking, its responses don't."""

    def play(addresses: Addresses, is_chat: bool) -> Any:
        chat = ChatOpenAI(
            model="policy",
            base_url=addresses.openai,
            api_key=SecretStr(addresses.key),
            use_responses_api=not is_chat,
        )
        model = chat.bind_tools([add])
        messages: list[Any] = [HumanMessage("what is it?")]
        while True:
            answer: Any = model.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                return answer.text
            for asked in answer.tool_calls:
                messages.append(ToolMessage(str(add(**asked["args"])), tool_call_id=asked["id"]))

    for is_chat in (True, False):
        assert played(SUMS, partial(play, is_chat=is_chat), SUM_PARENTS) == "It is 10."


def smolagents_tools() -> None:
    """It writes calls into the assistant's text and results into a user's, so each step is a context."""
    replies = [call("add", a=3, b=7), call("final_answer", answer="10")]

    def play(addresses: Addresses) -> Any:
        model = smolagents.OpenAIModel("policy", api_base=addresses.openai, api_key=addresses.key)
        tools = [smolagents.tool(add)]
        return smolagents.ToolCallingAgent(tools=tools, model=model, verbosity_level=0).run("what is it?")

    assert played(replies, play, [None, None]) == "10"


def mini_swe_agent() -> None:
    """It drops an answer without a call, and tells the model so in a user's message: a fork."""
    replies = [call("bash", command="echo hi"), "No call here.", call("bash", command=SUBMIT)]

    def play(addresses: Addresses) -> Any:
        arguments = {"api_base": addresses.openai, "api_key": addresses.key}
        model = LitellmModel(
            model_name="openai/policy", model_kwargs=arguments, cost_tracking="ignore_errors"
        )
        templates = {"system_template": "You have a shell.", "instance_template": "{{task}}"}
        return DefaultAgent(model, LocalEnvironment(), **templates).run("what is it?")

    assert played(replies, play, [None, 0, 0])["submission"].strip() == "10"


CHECKS = (pydantic_ai, langchain_openai, smolagents_tools, mini_swe_agent)


def main() -> None:
    for check in CHECKS:
        check()
        print(f"clients: {check.__name__}", flush=True)


if __name__ == "__main__":
    main()
