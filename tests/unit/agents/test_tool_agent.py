"""Episodes of ToolAgent with scripted calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from scripted_conversation import ScriptedConversation
from toy_tools import TOOL_CHATML, Notebook, divide

from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits, shortened
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.data.rewards import messages_of
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.types import AS_OPENED, CallOptions, Message, SamplingParams, Task, Trajectory

TASK = Task(id="train/data/0", tag="data", split="train", seed=0, payload={"prompt": "6 / 3?"})


def call(name: str, call_id: str = "a", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Calling(ScriptedConversation):
    """Answers with the given responses. Each is a list of calls; a str stands for a call that can't be
    read."""

    def __init__(self, responses: Sequence[Sequence[Any]], cut: int | None = None) -> None:
        super().__init__(f"response {number}" for number in range(len(responses)))
        self._calls, self._cut = list(responses), cut
        self.options: dict[str, Any] = {}

    async def generate(
        self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED
    ) -> Message | None:
        reply = await super().generate(new_messages, options)
        if reply is not None:
            said = self._calls.pop(0)
            reply["tool_calls"] = [made for made in said if isinstance(made, dict)]
            reply["call_errors"] = [made for made in said if isinstance(made, str)]
            if len(self.turns) - 1 == self._cut:
                self.turns[-1].finish_reason = "length"
        return reply

    def __call__(self, sampling: SamplingParams, **options: Any) -> Calling:
        self.options = options
        return self


def play(conversation: Calling, tool: Notebook | None = None, **limits: Any) -> Trajectory:
    tools = ToolBox([OfferedTool(FunctionTool(divide)), OfferedTool(tool or Notebook())], timeout_s=60.0)
    settings = RowAgentSettings(max_assistant_turns=limits.pop("max_assistant_turns", None))
    agent = ToolAgent(settings, tools=tools, limits=ToolAgentLimits(**limits))
    [trajectory] = asyncio.run(agent.run(TASK, 0, conversation, SamplingParams(max_new_tokens=8)))
    return trajectory


def results(conversation: Calling) -> list[tuple[str, str, str]]:
    return [
        (m["name"], m["tool_call_id"], m["content"]) for m in conversation.messages if m["role"] == "tool"
    ]


def test_calls_are_answered_until_a_response_has_none() -> None:
    conversation = Calling([[call("divide", a=6, b=3)], [call("note", "b", text="2.0")], []])
    trajectory = play(conversation)
    assert results(conversation) == [("divide", "a", "2.0"), ("note", "b", "2.0")]
    assert (trajectory.status, len(trajectory.turns)) == ("finished", 3)
    assert trajectory.outcome_rewards == {"tool/note": 0.25} and trajectory.score == 0.25
    assert trajectory.metrics["tool/divide/calls"] == trajectory.metrics["tool/note/calls"] == 1
    assert [schema["function"]["name"] for schema in conversation.options["tools"]] == ["divide", "note"]
    assert conversation.options["encode_special_tokens"] is False


def test_a_call_beyond_is_answered_and_not_executed() -> None:
    conversation = Calling(
        [[call("note", "a", text="x"), call("note", "b", text="y"), call("note", "c", text="z")], []]
    )
    play(conversation, max_parallel_calls=2)
    assert results(conversation)[:2] in (
        [("note", "a", "x"), ("note", "b", "x, y")],
        [("note", "a", "x, y"), ("note", "b", "x, y")],
    )
    assert results(conversation)[2:] == [("note", "c", "not executed: at most 2 calls a turn")]


def test_what_can_not_be_read_is_answered_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    conversation = Calling([["the call isn't closed"], [call("nothing")], ["half a \ud83d"], []])
    trajectory = play(conversation)
    assert results(conversation) == [
        ("error", "error0000", "the call isn't closed"),
        ("error", "a", "Unknown function 'nothing'. Available tools: divide, note"),
        ("error", "error0000", "half a ?"),
    ]
    assert trajectory.metrics["unreadable_calls"] == 2 and trajectory.metrics["tool_calls"] == 3
    assert trajectory.metrics["unknown_tools"] == 1
    assert "Failed to decode tool call: the call isn't closed" in caplog.text
    assert "Failed to decode tool call: Unknown function 'nothing'" in caplog.text


@pytest.mark.parametrize(
    ("responses", "limits", "cut", "limit"),
    [
        ([[call("divide", a=6, b=3)]] * 3, {"max_assistant_turns": 2}, None, "max_steps"),
        ([[call("divide", a=6, b=3)]], {}, None, "sequence_length"),
        ([[]], {}, 0, "sequence_length"),
        ([[call("divide", a=6, b=3)], [call("divide", a=6, b=3)], []], {}, 1, "max_new_tokens"),
    ],
    ids=["turns", "no room for the result", "a response that the context cuts", "a cut response with a call"],
)
def test_limits_are_outcomes(responses: Any, limits: dict[str, Any], cut: int | None, limit: str) -> None:
    trajectory = play(Calling(responses, cut), **limits)
    assert (trajectory.status, trajectory.limit) == ("truncated", limit)
    assert len(trajectory.turns) == min(len(responses), 2 if limits or cut else 1)


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_a_long_result_is_shortened(side: Any) -> None:
    conversation = Calling([[call("note", text="large")], []])
    play(conversation, max_tool_response_length=100, tool_response_truncate_side=side)
    [(_, _, text)] = results(conversation)
    assert text.count("x") == 100 and "(truncated)" in text
    assert (text[0], text[-1]) == {"left": ("(", "x"), "middle": ("x", "x"), "right": ("x", ")")}[side]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_what_is_shortened_keeps_so_many_characters(limit: int, side: Any) -> None:
    assert len(shortened("x" * 8, limit, side).replace("(truncated)", "").replace(".", "")) == limit


def test_a_tool_that_crashes_ends_the_other_calls_and_raises() -> None:
    tool = Notebook()
    conversation = Calling([[call("note", "a", text="hang"), call("note", "b", text="raise")], []])
    with pytest.raises(RuntimeError, match="the service is down"):
        play(conversation, tool, max_parallel_calls=2)
    assert tool.num_open == 0 and not tool.has_hung


def test_tokens_calls_and_results_go_through_a_real_context() -> None:
    template = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
    said = [
        '<tool_call>{"name": "divide", "arguments": {"a": 6, "b": 3}}</tool_call>',
        "<tool_call>{",
        "It is 2.",
    ]
    server = ScriptedServer([template.respond(response) for response in said])
    contexts = TokenContexts(template, server, 4096, "episode", parser=find_parser("hermes", template))
    tools = ToolBox([OfferedTool(FunctionTool(divide))], timeout_s=60.0)
    agent = ToolAgent(RowAgentSettings(), tools=tools, limits=ToolAgentLimits())
    [trajectory] = asyncio.run(agent.run(TASK, 0, contexts, SamplingParams(max_new_tokens=256)))
    contexts.verify()
    assert (trajectory.status, [turn.text for turn in trajectory.turns]) == ("finished", said)
    assert trajectory.turns[1].observation == "2.0" and trajectory.metrics["unreadable_calls"] == 1
    # The messages that rewards get: results have the role `tool`, calls are in OpenAI's form.
    heard = messages_of(trajectory, "prompt")
    assert [message["role"] for message in heard] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert heard[1]["tool_calls"][0]["function"] == {"name": "divide", "arguments": {"a": 6, "b": 3}}
    assert (heard[2]["name"], heard[2]["content"]) == ("divide", "2.0") and heard[1]["content"] == said[0]
