"""A reply is split into text, calls and thinking wherever it is shown again; `Turn.text` stays as it was
sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_messages import tool, user

from turnwise.chat.conversation import TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.envs.parsing import parse_action
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import CallOptions, SamplingParams, Turn

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
TEMPLATES = {name: (FOLDER / f"{name}.jinja").read_text() for name in ("qwen2.5-instruct", "qwen3")}
TEMPLATES["own"] = CHAT_TEMPLATE
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADD = tool("add", "Adds two numbers.", a="integer")
SUBTRACT = tool("subtract", "Subtracts two numbers.", a="integer")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = "<tool_call>{nothing</tool_call>"


def conversed(template: ChatTemplate, text: str) -> tuple[dict[str, Any], list[Turn], str]:
    """The reply that says `text`, the turns, and the prompt that shows this reply again to other tools."""
    server = ScriptedServer([template.tokenizer.encode(f"{text}<|im_end|>"), template.stop_token_ids[:1]])
    sampling = SamplingParams(max_new_tokens=400)
    parser = find_parser(None, template)
    conversation = TokenConversation(template, server, "c", sampling, 9000, tools=[ADD], parser=parser)

    async def converse() -> dict[str, Any]:
        reply = await conversation.generate([user("What is it?")])
        assert reply is not None
        await conversation.generate([user("And now?")], CallOptions(tools=[ADD, SUBTRACT]))
        return reply

    reply = asyncio.run(converse())
    shown = template.decode(conversation.turns[1].prompt_ids.tolist(), skips_turn_tokens=False)
    _, _, shown_again = shown.partition("What is it?")
    assert "Subtracts two numbers." in shown
    return reply, conversation.turns, shown_again


@pytest.fixture(params=sorted(TEMPLATES))
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(SPECIAL, TEMPLATES[request.param], eos_token="<|im_end|>"))


@pytest.mark.parametrize("thinking", ["", "<think>\nWell\n</think>\n\n"])
def test_a_call_is_shown_once_where_the_tools_change(template: ChatTemplate, thinking: str) -> None:
    text = f"{thinking}Let me see.\n{CALL}"
    reply, turns, shown_again = conversed(template, text)
    assert reply["content"] == "Let me see."
    assert reply.get("reasoning_content", "") == ("Well" if thinking else "")
    assert [call["function"] for call in reply["tool_calls"]] == [{"name": "add", "arguments": {"a": 1}}]
    assert turns[0].text == turns[0].messages[-1]["content"] == text
    assert shown_again.count("<tool_call>") == shown_again.count('"add"') == 1
    assert shown_again.count("Let me see.") == 1


@pytest.mark.parametrize("text", [BROKEN, f"First {BROKEN} then {CALL}"], ids=["alone", "beside a call"])
def test_a_call_that_cannot_be_read_stays_text(template: ChatTemplate, text: str) -> None:
    reply, _, shown_again = conversed(template, text)
    assert len(reply["call_errors"]) == 1 and BROKEN in reply["content"]
    assert shown_again.count(BROKEN) == 1 and shown_again.count('"add"') == text.count('"add"')


def test_a_pattern_of_two_groups_reads_thinking_and_answer_of_the_whole_text(template: ChatTemplate) -> None:
    text = "<think>Up is a hole.</think><answer>Left</answer>"
    reply, turns, _ = conversed(template, text)
    assert reply["reasoning_content"] == "Up is a hole." and reply["content"] == "<answer>Left</answer>"
    pattern = "<think>(.*?)</think>\\s*<answer>(.*?)</answer>"
    assert parse_action(turns[0].text, pattern) == "Left"
    assert parse_action(reply["content"], pattern) is None
