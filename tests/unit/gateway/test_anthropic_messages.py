"""Anthropic's messages: what is read, refused and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from chat_messages import user
from gateway_choices import choice_of, events_of

from turnwise.errors import RequestError
from turnwise.gateway.anthropic import CountTokens, Messages
from turnwise.gateway.chat_completions import ChatCompletions
from turnwise.gateway.dialect import GatewayError

DIALECT = Messages()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": list(messages or [user("go")]), **fields}


def test_a_system_list_is_one_message_without_the_billing_line() -> None:
    system = [
        text("x-anthropic-billing-header: cch=1;"),
        text("Be brief.", cache_control={"type": "ephemeral"}),
        text("And kind.\nx-anthropic-billing-header: cch=2;"),
    ]
    request = DIALECT.read(body(system=system))
    assert request.messages[0] == {"role": "system", "content": "Be brief.\n\nAnd kind."}
    assert request.removed == ("x-anthropic-billing-header",)
    alone = DIALECT.read(body(system="x-anthropic-billing-header: cch=3;"))
    assert [message["role"] for message in alone.messages] == ["user"] and alone.removed
    assert DIALECT.read(body(system="Be brief.")).removed == ()


def test_blocks_become_messages_in_their_order() -> None:
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        text("Let me see."),
        {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    ]
    results = [result("c0", "3"), result("c1", [text("7"), text("!")]), text("And "), text("then?")]
    late = {"role": "system", "content": [text("Hurry.")]}
    request = DIALECT.read(
        body(user("go"), {"role": "assistant", "content": answer}, {"role": "user", "content": results}, late)
    )
    assert [message["role"] for message in request.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "system",
    ]
    said = request.messages[1]
    assert (said["content"], said["reasoning_content"]) == ("Let me see.", "hm")
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"a": 1}, {}]
    assert [message["content"] for message in request.messages[2:]] == ["3", "7!", "And then?", "Hurry."]


def test_thinking_that_cannot_be_read_counts_as_left_out() -> None:
    answer = [{"type": "redacted_thinking", "data": "x"}, text("hi")]
    request = DIALECT.read(body(user("go"), {"role": "assistant", "content": answer}, user("again")))
    assert request.messages[1] == {"role": "assistant", "content": "hi"}


def test_a_tool_is_the_same_as_in_openai_s_chat() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    chat = {"model": "m", "messages": [user("go")], "tools": [{"type": "function", "function": function}]}
    assert DIALECT.read(body(tools=[ADD])).tools == ChatCompletions().read(chat).tools


def test_what_cannot_be_enforced_and_what_sampling_overrides_is_listed() -> None:
    request = DIALECT.read(
        body(
            tools=[ADD, {"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            output_config={"effort": "high", "format": {"type": "json_schema"}},
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            thinking={"type": "adaptive"},
            top_k=3,
            stop_sequences=["end"],
        )
    )
    assert set(request.unenforced) == {
        "tool_choice any",
        "tool_choice.disable_parallel_tool_use",
        "output_config.format",
        "context_management",
        "tool web_search_20250305",
    }
    assert request.ignored == ("top_k", "thinking") and request.options.stop == ("end",)
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    plain = DIALECT.read(body(tools=[ADD], tool_choice={"type": "none"}, context_management=kept))
    assert (plain.tools, plain.unenforced) == ((), ())


def test_the_answer_s_blocks_come_back_as_the_same_message() -> None:
    request = DIALECT.read(body(tools=[ADD]))
    choice = choice_of("Let me see.", thinking="hm", calls=[("add", {"a": 1})])
    answer = DIALECT.response(request, [choice], "turn-7")
    assert (answer["stop_reason"], answer["usage"]["input_tokens"]) == ("tool_use", 8)
    assert answer["usage"]["cache_read_input_tokens"] == 2
    again = DIALECT.read(body(user("go"), {"role": "assistant", "content": answer["content"]})).messages[-1]
    assert again == choice.message
    cut = DIALECT.response(request, [choice_of("", finish_reason="length")], "turn-8")
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["text"] == ""


def test_events_build_the_message_block_by_block() -> None:
    request = DIALECT.read(body(tools=[ADD], stream=True))
    choice = choice_of("see", thinking="hm", calls=[("add", {"a": 1})])
    events = events_of(DIALECT.events(request, [choice], "turn-7"))
    assert all(name == event["type"] for name, event in events)
    assert [events[0][0], events[-2][0], events[-1][0]] == ["message_start", "message_delta", "message_stop"]
    assert events[0][1]["message"]["content"] == []
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
    ]
    starts = [event["content_block"] for name, event in events if name == "content_block_start"]
    assert (starts[0]["thinking"], starts[1]["text"], starts[2]["input"]) == ("", "", {})
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_errors_have_anthropic_s_form() -> None:
    error = DIALECT.error(GatewayError("no key", "invalid_api_key"))
    assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
    long = DIALECT.error(GatewayError("9 tokens", "context_length_exceeded"))["error"]
    assert long["type"] == "invalid_request_error"
    assert long["message"].startswith("prompt is too long"), "by these words Claude Code shortens its history"
    [(name, event)] = events_of(DIALECT.error_events(GatewayError("It broke.", "server_error")))
    assert (name, event["error"]["type"]) == ("error", "api_error")


def test_a_count_is_read_like_a_message_without_a_budget() -> None:
    counter = CountTokens()
    request = counter.read({"model": "m", "messages": [user("go")], "system": "Be brief.", "tools": [ADD]})
    assert len(request.messages) == 2 and len(request.tools) == 1
    assert counter.response(7) == {"input_tokens": 7}


BAD: dict[str, Mapping[str, Any]] = {
    "model": {"model": ""},
    "mesages": {"mesages": []},
    "max_tokens": {"max_tokens": 0},
    "container": {"container": "c"},
    "tool_choice": {"tool_choice": "auto"},
    "tool_choice.type": {"tool_choice": {"type": "always"}},
    "output_config": {"output_config": "json"},
    "stop_sequences": {"stop_sequences": [""]},
    "system": {"system": 4},
    "system[0]": {"system": [{"type": "image"}]},
    "messages": {"messages": "go"},
    "messages[0]": {"messages": ["go"]},
    "messages[0].role": {"messages": [{"role": "tool", "content": ""}]},
    "messages[0].content": {"messages": [{"role": "user", "content": 4}]},
    "messages[0].content[0]": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "messages[0].content[0] document": {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
    "messages[0].content[0].tool_use_id": {
        "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]
    },
    "messages[0].content[0].id": {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
    "messages[0].content[0].text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "tools[0]": {"tools": ["add"]},
    "tools[0] computer": {"tools": [{"type": "computer_20250124", "name": "computer"}]},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(RequestError) as fault:
        DIALECT.read(body() | BAD[name])
    assert name.split()[0] in str(fault.value)
