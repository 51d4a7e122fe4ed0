"""OpenAI's responses: what is read, refused and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from chat_messages import user
from gateway_choices import choice_of, events_of

from turnwise.errors import RequestError
from turnwise.gateway.chat_completions import ChatCompletions
from turnwise.gateway.dialect import GatewayError
from turnwise.gateway.responses import Responses

DIALECT = Responses()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
SPAWN = {"type": "function", "name": "spawn", "parameters": SCHEMA}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN]}


def body(given: Any = "go", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": given, **fields}


def items_of_an_answer(**call: Any) -> list[dict[str, Any]]:
    return [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Let me ", "annotations": []},
                {"type": "text", "text": "see."},
            ],
        },
        {"type": "function_call", "call_id": "c0", "name": "add", "arguments": '{"a": 1}', **call},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
    ]


def test_items_that_follow_each_other_are_one_answer() -> None:
    results = [{"type": "function_call_output", "call_id": f"c{n}", "output": str(n)} for n in range(2)]
    request = DIALECT.read(body([user("go"), *items_of_an_answer(), *results], instructions="Be brief."))
    system, asked, answer, first, second = request.messages
    assert (system["role"], asked["content"]) == ("system", "go")
    assert (answer["content"], answer["reasoning_content"]) == ("Let me see.", "hm")
    assert [call["id"] for call in answer["tool_calls"]] == ["c0", "c1"]
    assert (first["tool_call_id"], second["content"]) == ("c0", "1")


def test_two_answers_in_a_row_stay_two() -> None:
    said = {"role": "assistant", "content": "left"}
    call = {"type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": []}
    request = DIALECT.read(body([user("go"), said, said, call, said, thought, said]))
    answers = [message for message in request.messages if message["role"] == "assistant"]
    assert [message["content"] for message in answers] == ["left", "left", "left", "left"]
    assert [len(message.get("tool_calls", ())) for message in answers] == [0, 1, 0, 0]


def test_a_tool_is_the_same_in_both_of_openai_s_dialects() -> None:
    function = {key: value for key, value in ADD.items() if key not in ("type", "strict")}
    chat = {"model": "m", "messages": [user("go")], "tools": [{"type": "function", "function": function}]}
    assert DIALECT.read(body(tools=[ADD])).tools == ChatCompletions().read(chat).tools


def test_tools_of_a_namespace_are_flattened_and_their_calls_go_back_into_it() -> None:
    request = DIALECT.read(body(tools=[ADD, AGENTS]))
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["add", "agents__spawn"]
    answer = DIALECT.response(request, [choice_of("", calls=[("agents__spawn", {"a": 1})])], "turn-3")
    [call] = answer["output"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn")
    again = DIALECT.read(body([user("go"), call], tools=[ADD, AGENTS])).messages[-1]
    assert again["tool_calls"][0]["function"]["name"] == "agents__spawn"


def test_tools_of_the_server_are_dropped_and_named() -> None:
    request = DIALECT.read(
        body(tools=[ADD, {"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}])
    )
    assert len(request.tools) == 1
    assert request.unenforced == ("tool web_search", "tool web_search_preview_2025_03_11")


def test_what_cannot_be_enforced_and_what_sampling_overrides_is_listed() -> None:
    request = DIALECT.read(
        body(
            tool_choice="required",
            parallel_tool_calls=False,
            text={"format": {"type": "json_schema"}, "verbosity": "low"},
            store=True,
            truncation="auto",
            top_p=0.5,
            reasoning={"effort": "low"},
            temperature=0.5,
        )
    )
    kinds = {"tool_choice required", "parallel_tool_calls false", "text.format", "store", "truncation"}
    assert set(request.unenforced) == kinds
    assert request.ignored == ("top_p", "reasoning") and request.options.temperature == 0.5
    plain = DIALECT.read(
        body(store=False, tools=[ADD], tool_choice="none", include=["reasoning.encrypted_content"])
    )
    assert (plain.tools, plain.unenforced, plain.ignored) == ((), (), ())


def test_log_probs_are_asked_for_by_include() -> None:
    request = DIALECT.read(body(include=["message.output_text.logprobs"]))
    assert request.has_logprobs
    answer = DIALECT.response(request, [choice_of("hi", logprobs=[("hi", -0.5, (104, 105))])], "turn-0")
    [entry] = answer["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["bytes"]) == ("hi", [104, 105])


def test_the_answer_s_items_come_back_as_the_same_message() -> None:
    request = DIALECT.read(body(tools=[ADD]))
    choice = choice_of("Let me see.", thinking="hm", calls=[("add", {"a": 1}), ("add", {"a": 2})])
    answer = DIALECT.response(request, [choice], "turn-7")
    assert answer["status"] == "completed" and answer["usage"]["input_tokens_details"]["cached_tokens"] == 2
    message = DIALECT.read(body([user("go"), *answer["output"]])).messages[-1]
    assert message["content"] == choice.message["content"]
    assert message["reasoning_content"] == choice.message["reasoning_content"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"a": 1},
        {"a": 2},
    ]


def test_an_answer_that_was_cut_is_incomplete_and_an_empty_one_has_an_empty_text() -> None:
    request = DIALECT.read(body())
    answer = DIALECT.response(request, [choice_of("", finish_reason="length")], "turn-0")
    assert (answer["status"], answer["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert answer["output"][0]["content"][0]["text"] == ""


def test_events_build_the_response_item_by_item() -> None:
    request = DIALECT.read(body(tools=[ADD], stream=True))
    choice = choice_of("see", thinking="hm", calls=[("add", {"a": 1})])
    events = events_of(DIALECT.events(request, [choice], "turn-7"))
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert all(name == event["type"] for name, event in events)
    assert events[0][0] == "response.created" and events[-1][0] == "response.completed"
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    deltas = [event["delta"] for name, event in events if name.endswith(".delta")]
    assert deltas == ["hm", "see", '{"a": 1}']


def test_a_stream_that_fails_ends_with_an_error() -> None:
    [(name, event)] = events_of(DIALECT.error_events(GatewayError("It broke.", "server_error")))
    assert name == event["type"] == "error"
    assert event["message"] == event["error"]["message"] == "It broke."


BAD: dict[str, Mapping[str, Any]] = {
    "model": {"model": None},
    "inpt": {"inpt": "go"},
    "input": {"input": None},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "background": {"background": True},
    "conversation": {"conversation": "conv_1"},
    "prompt": {"prompt": {"id": "p"}},
    "top_logprobs": {"top_logprobs": 3},
    "max_output_tokens": {"max_output_tokens": 0},
    "temperature": {"temperature": "hot"},
    "text": {"text": "json"},
    "tool_choice": {"tool_choice": "always"},
    "instructions": {"instructions": ["a"]},
    "stream": {"stream": "yes"},
    "input[0]": {"input": ["go"]},
    "input[0] type": {"input": [{"type": "item_reference", "id": "x"}]},
    "input[0].role": {"input": [{"role": "tool", "content": "x"}]},
    "input[0].content": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "input[0].content file": {
        "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]
    },
    "input[0].content number": {"input": [{"role": "user", "content": 4}]},
    "input[0].content no text": {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    "input[0].call_id": {"input": [{"type": "function_call_output", "output": "3"}]},
    "input[0].name": {"input": [{"type": "function_call", "call_id": "c0"}]},
    "tools[0]": {"tools": ["add"]},
    "tools[0] custom": {"tools": [{"type": "custom", "name": "patch"}]},
    "tools[0] namespace": {"tools": [{"type": "namespace", "name": "n"}]},
    "tools[0].name": {"tools": [{"type": "function"}]},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(RequestError) as fault:
        DIALECT.read(body() | BAD[name])
    assert name.split()[0] in str(fault.value)
    assert DIALECT.error(GatewayError(str(fault.value)))["error"]["code"] == "invalid_request"
