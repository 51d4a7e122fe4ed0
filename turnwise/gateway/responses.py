"""`/v1/responses`, OpenAI's protocol of items, as the Agents SDK and Codex speak it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.gateway.dialect import (
    Choice,
    GatewayError,
    ModelRequest,
    arguments_text,
    check_fields,
    read_count,
    read_flag,
    read_list,
    read_number,
    read_text,
    refuse,
    server_sent_event,
)
from turnwise.gateway.response_items import messages_of, names_of, tools_of
from turnwise.types import CallOptions, Message

_OF_SAMPLING = ("top_p", "reasoning")
"""Fields that the run's sampling overrides."""
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "client_metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "max_tool_calls",
    "stream_options",
)
"""Fields that change no answer: `max_tool_calls` counts those of the server's own tools."""
_REFUSED = {
    "previous_response_id": "answers aren't kept; send the whole history as `input` with each request",
    "conversation": "conversations aren't kept; send the whole history as `input` with each request",
    "background": "an answer can't be looked up later; wait for it, or set `stream`",
    "prompt": "no prompts are kept here; send `instructions` and `input`",
    "context_management": "the history isn't changed here; shorten it before it is sent",
}
_SERVED = (
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "include",
    "max_output_tokens",
    "temperature",
    "top_logprobs",
    "stream",
    "store",
    "truncation",
)
_KNOWN = (*_SERVED, *_OF_SAMPLING, *_WITHOUT_EFFECT, *_REFUSED)
_MAX_TEMPERATURE = 2.0
_LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probs."""


class Responses:
    """OpenAI's responses as a `Dialect`.

    >>> request = Responses().read({"model": "m", "instructions": "Be brief.", "input": "go"})
    >>> [message["role"] for message in request.messages]
    ['system', 'user']
    """

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        check_fields(body, _KNOWN)
        refuse(body, _REFUSED)
        if body.get("top_logprobs"):
            raise GatewayError("`top_logprobs` above 0 isn't served; leave it out", param="top_logprobs")
        if body.get("input") is None:
            raise GatewayError("`input` is missing: a text or a list of items", param="input")
        messages = messages_of(body["input"])
        instructions = body.get("instructions")
        if instructions:
            system: Message = {"role": "system", "content": read_text(body, "instructions")}
            messages.insert(0, system)
        tools, dropped = tools_of(read_list(body, "tools"))
        choice = body.get("tool_choice")
        temperature = read_number(body, "temperature", 0.0, _MAX_TEMPERATURE)
        return ModelRequest(
            model=read_text(body, "model"),
            messages=tuple(messages),
            tools=() if choice == "none" else tuple(tools),
            options=CallOptions(read_count(body, "max_output_tokens"), temperature),
            is_streamed=read_flag(body, "stream"),
            has_logprobs=_LOGPROBS in read_list(body, "include"),
            ignored=tuple(name for name in _OF_SAMPLING if body.get(name)),
            unenforced=(*_unenforced(body, choice), *dropped),
            body=body,
        )

    def response(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> dict[str, Any]:
        choice = choices[0]
        answer = _head(request, name)
        answer["output"] = list(_items(request, choice, name))
        answer["usage"] = _usage(choice)
        answer["status"] = "completed"
        answer["completed_at"] = int(time.time())
        if choice.finish_reason == "length":
            answer["status"] = "incomplete"
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        return answer

    def events(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> Iterator[bytes]:
        answer = self.response(request, choices, name)
        begun = _head(request, name)
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(answer["output"]):
            events += _events_of(item, index)
        events.append({"type": f"response.{answer['status']}", "response": answer})
        for number, event in enumerate(events):
            yield server_sent_event({**event, "sequence_number": number}, event["type"])

    def error(self, error: GatewayError) -> dict[str, Any]:
        return {
            "error": {
                "message": error.sentence,
                "type": "server_error" if error.status >= 500 else "invalid_request_error",
                "param": error.param,
                "code": error.code,
            }
        }

    def error_events(self, error: GatewayError) -> Iterator[bytes]:
        """One event of type `error`. Its data has an `error` too, by which OpenAI's client raises."""
        event = {
            "type": "error",
            "code": error.code,
            "message": error.sentence,
            "param": error.param,
            "sequence_number": 0,
            **self.error(error),
        }
        yield server_sent_event(event, "error")


def _unenforced(body: Mapping[str, Any], choice: Any) -> Iterator[str]:
    """What a request asks for and doesn't get."""
    if isinstance(choice, Mapping):
        yield f"tool_choice {str(choice.get('type'))[:40]}"
    elif choice not in (None, "auto", "none"):
        if choice != "required":
            raise GatewayError(
                f"`tool_choice` is {str(choice)[:80]!r}; it must be none, auto, required or a tool",
                param="tool_choice",
            )
        yield "tool_choice required"
    if body.get("parallel_tool_calls") is False:
        yield "parallel_tool_calls false"
    text = body.get("text") or {}
    if not isinstance(text, Mapping) or not isinstance(text.get("format") or {}, Mapping):
        raise GatewayError("`text` must be an object with `format`, an object", param="text")
    if (text.get("format") or {}).get("type", "text") != "text":
        yield "text.format"
    if read_flag(body, "store"):
        yield "store"
    if body.get("truncation") not in (None, "disabled"):
        yield "truncation"


def _head(request: ModelRequest, name: str) -> dict[str, Any]:
    """A response that has no output yet."""
    body = request.body
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": body.get("user"),
    }


def _items(request: ModelRequest, choice: Choice, name: str) -> Iterator[dict[str, Any]]:
    """The items of an answer: its reasoning, its text, its calls. Their ids are made up: nobody looks them
    up."""
    message = choice.message
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    if message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield {
            "id": f"rs_{name}",
            "type": "reasoning",
            "summary": [],
            "content": parts,
            "encrypted_content": None,
            "status": status,
        }
    calls = message.get("tool_calls") or ()
    if message["content"] or not calls:
        part = {
            "type": "output_text",
            "text": message["content"],
            "annotations": [],
            "logprobs": _logprobs(choice),
        }
        yield {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
    names = names_of(request.body.get("tools"))
    for index, call in enumerate(calls):
        function = call["function"]
        item = {
            "id": f"fc_{name}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": arguments_text(function["arguments"]),
        }
        if function["name"] in names:
            namespace, name_there = names[function["name"]]
            item |= {"namespace": namespace, "name": name_there}
        yield item


def _logprobs(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(token_bytes or ()), "top_logprobs": []}
        for token, logprob, token_bytes in choice.logprobs or ()
    ]


def _usage(choice: Choice) -> dict[str, Any]:
    usage = choice.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": 0},
        "output_tokens": usage.response,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.response,
    }


def _events_of(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """The events that build an item, without their numbers."""
    begun = {**item, "status": "in_progress"}
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        begun["arguments"] = ""
    else:
        begun["content"] = []
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        arguments = item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
    else:
        yield from _events_of_part(item["content"][0], {**place, "content_index": 0})
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _events_of_part(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events that build the one part of a text or of a reasoning."""
    kind = f"response.{part['type']}"
    empty = {**part, "text": ""}
    logprobs = {}
    if "logprobs" in part:
        logprobs["logprobs"] = part["logprobs"]
        empty["logprobs"] = []
    yield {"type": "response.content_part.added", **place, "part": empty}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}
