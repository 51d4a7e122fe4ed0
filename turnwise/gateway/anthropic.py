"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's protocol of content blocks, as Claude Code
speaks it."""

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
    read_stop,
    read_text,
    refuse,
    server_sent_event,
)
from turnwise.gateway.message_blocks import messages_of, system_of, tools_of
from turnwise.types import CallOptions

_OF_SAMPLING = ("top_p", "top_k", "thinking")
"""Fields that the run's sampling overrides."""
_WITHOUT_EFFECT = (
    "metadata",
    "cache_control",
    "service_tier",
    "inference_geo",
    "speed",
    "diagnostics",
    "user_profile_id",
    "workspace_id",
    "betas",
)
"""Fields that change no answer."""
_REFUSED = {
    "container": "nothing is run here; give the model tools of your own",
    "thread": "conversations aren't kept; send all `messages` with each request",
    "compaction": "the history isn't changed here; shorten it before it is sent",
    "fallbacks": "there is one model; leave it out",
}
_SERVED = (
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "max_tokens",
    "temperature",
    "stop_sequences",
    "stream",
    "output_config",
    "output_format",
    "context_management",
    "mcp_servers",
)
_KNOWN = (*_SERVED, *_OF_SAMPLING, *_WITHOUT_EFFECT, *_REFUSED)
_MAX_TEMPERATURE = 2.0
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_TOO_LONG = "prompt is too long: "
"""The words by which Claude Code knows that it must shorten its history."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """Anthropic's messages as a `Dialect`.

    >>> go = {"role": "user", "content": "go"}
    >>> request = Messages().read({"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [go]})
    >>> [message["role"] for message in request.messages]
    ['system', 'user']
    """

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        return _read(body)

    def response(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> dict[str, Any]:
        choice = choices[0]
        answer = _head(request, choice, name)
        answer["content"] = list(_blocks(choice))
        answer["stop_reason"] = _STOP_REASONS[choice.finish_reason]
        return answer

    def events(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> Iterator[bytes]:
        choice = choices[0]
        begun = _head(request, choice, name)
        begun["usage"] = {**begun["usage"], "output_tokens": 0}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(_blocks(choice)):
            empty, deltas = _parts_of(block)
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None}
        events.append({"type": "message_delta", "delta": end, "usage": _usage(choice)})
        events.append({"type": "message_stop"})
        for event in events:
            yield server_sent_event(event, event["type"])

    def error(self, error: GatewayError) -> dict[str, Any]:
        return _error(error)

    def error_events(self, error: GatewayError) -> Iterator[bytes]:
        yield server_sent_event(_error(error), "error")


class CountTokens:
    """The count of a prompt's tokens as a `TokenCounter`."""

    path = "/v1/messages/count_tokens"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        return _read(body)

    def response(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}

    def error(self, error: GatewayError) -> dict[str, Any]:
        return _error(error)


def _read(body: Mapping[str, Any]) -> ModelRequest:
    check_fields(body, _KNOWN)
    refuse(body, _REFUSED)
    system, removed = system_of(body.get("system"))
    messages = messages_of(read_list(body, "messages"))
    if system:
        messages.insert(0, {"role": "system", "content": system})
    tools, dropped = tools_of(read_list(body, "tools"))
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, Mapping):
        raise GatewayError("`tool_choice` must be an object with a `type`", param="tool_choice")
    temperature = read_number(body, "temperature", 0.0, _MAX_TEMPERATURE)
    stop = read_stop(body, "stop_sequences")
    return ModelRequest(
        model=read_text(body, "model"),
        messages=tuple(messages),
        tools=() if choice.get("type") == "none" else tuple(tools),
        options=CallOptions(read_count(body, "max_tokens"), temperature, stop),
        is_streamed=read_flag(body, "stream"),
        ignored=tuple(name for name in _OF_SAMPLING if body.get(name) is not None),
        unenforced=(*_unenforced(body, choice), *dropped),
        removed=tuple(removed),
        body=body,
    )


def _unenforced(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[str]:
    """What a request asks for and doesn't get."""
    kind = choice.get("type")
    if kind not in ("auto", "none"):
        if kind not in ("any", "tool"):
            raise GatewayError(
                f"`tool_choice.type` is {str(kind)[:80]!r}; it must be none, auto, any or tool",
                param="tool_choice",
            )
        yield f"tool_choice {kind}"
    if choice.get("disable_parallel_tool_use"):
        yield "tool_choice.disable_parallel_tool_use"
    config = _object(body, "output_config")
    if config.get("format") or body.get("output_format"):
        yield "output_config.format"
    edits = read_list(_object(body, "context_management"), "edits")
    if any(not _keeps_all(edit) for edit in edits):
        yield "context_management"
    if body.get("mcp_servers"):
        yield "mcp_servers"


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise GatewayError(f"`{name}` must be an object", param=name)
    return value


def _keeps_all(edit: Any) -> bool:
    """Whether an edit of the history changes nothing."""
    return isinstance(edit, Mapping) and edit.get("keep") == "all"


def _head(request: ModelRequest, choice: Choice, name: str) -> dict[str, Any]:
    """A message that has no content yet."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(choice),
    }


def _blocks(choice: Choice) -> Iterator[dict[str, Any]]:
    """The blocks of an answer: its reasoning, its text, its calls."""
    message = choice.message
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    calls = message.get("tool_calls") or ()
    if message["content"] or not calls:
        yield {"type": "text", "text": message["content"], "citations": None}
    for call in calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }


def _parts_of(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The empty block with which a stream begins, and the deltas that fill it."""
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": ""},
        ]
        return {**block, "thinking": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = arguments_text(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _usage(choice: Choice) -> dict[str, Any]:
    """Tokens of the prompt that are new, those that an earlier response had, and those of the response."""
    usage = choice.usage
    return {
        "input_tokens": usage.prompt - usage.reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.reused,
        "output_tokens": usage.response,
    }


def _error(error: GatewayError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    if error.status >= 500:
        kind = "api_error"
    sentence = error.sentence
    if error.code == "context_length_exceeded":
        sentence = _TOO_LONG + sentence
    return {"type": "error", "error": {"type": kind, "message": sentence}}
