"""`/v1/chat/completions`, OpenAI's chat."""

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
    read_stop,
    read_text,
    refuse,
    server_sent_event,
)
from turnwise.types import CallOptions

_OF_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "reasoning_effort",
    "verbosity",
)
"""Fields that the run's sampling overrides."""
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)
"""Fields that change no answer."""
_UNENFORCED = ("web_search_options", "store")
"""Fields that are served without what they ask for, if they ask for anything."""
_REFUSED = {
    "functions": "send `tools`",
    "function_call": "send `tools` and `tool_choice`",
    "audio": "the model answers with text alone",
}
_SERVED = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "modalities",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "n",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
)
_KNOWN = (*_SERVED, *_OF_SAMPLING, *_WITHOUT_EFFECT, *_UNENFORCED, *_REFUSED)
_MAX_TEMPERATURE = 2.0


class ChatCompletions:
    """OpenAI's chat as a `Dialect`.

    >>> request = ChatCompletions().read({"model": "m", "messages": [{"role": "user", "content": "go"}]})
    >>> request.num_choices, request.is_streamed
    (1, False)
    """

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        check_fields(body, _KNOWN)
        refuse(body, _REFUSED)
        if body.get("top_logprobs") not in (None, 0):
            raise GatewayError("`top_logprobs` above 0 isn't served; leave it out", param="top_logprobs")
        if body.get("modalities") not in (None, ["text"]):
            raise GatewayError(
                '`modalities` must be ["text"]: the model answers with text', param="modalities"
            )
        stream_options = body.get("stream_options") or {}
        if not isinstance(stream_options, Mapping):
            raise GatewayError("`stream_options` must be an object", param="stream_options")
        budgets = [read_count(body, name) for name in ("max_tokens", "max_completion_tokens")]
        temperature = read_number(body, "temperature", 0.0, _MAX_TEMPERATURE)
        max_new_tokens = min((budget for budget in budgets if budget is not None), default=None)
        choice = body.get("tool_choice")
        tools = () if choice == "none" else tuple(read_list(body, "tools"))
        return ModelRequest(
            model=read_text(body, "model"),
            messages=tuple(read_list(body, "messages")),
            tools=tools,
            options=CallOptions(max_new_tokens, temperature, read_stop(body)),
            num_choices=read_count(body, "n") or 1,
            is_streamed=read_flag(body, "stream"),
            has_logprobs=read_flag(body, "logprobs"),
            has_stream_usage=read_flag(stream_options, "include_usage"),
            ignored=tuple(name for name in _OF_SAMPLING if body.get(name) is not None),
            unenforced=tuple(_unenforced(body, choice)),
            body=body,
        )

    def response(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> dict[str, Any]:
        answer = _head(request, name, "chat.completion")
        answer["choices"] = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": _logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer["usage"] = _usage(choices)
        return answer

    def events(self, request: ModelRequest, choices: Sequence[Choice], name: str) -> Iterator[bytes]:
        head = _head(request, name, "chat.completion.chunk")
        if request.has_stream_usage:
            head["usage"] = None
        for index, choice in enumerate(choices):
            for delta in _deltas(choice):
                part = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                if "content" in delta and "role" not in delta:
                    part["logprobs"] = _logprobs(choice)
                yield server_sent_event({**head, "choices": [part]})
            end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
            yield server_sent_event({**head, "choices": [end]})
        if request.has_stream_usage:
            yield server_sent_event({**head, "choices": [], "usage": _usage(choices)})
        yield server_sent_event("[DONE]")

    def error(self, error: GatewayError) -> dict[str, Any]:
        return {
            "error": {
                "message": error.sentence,
                "type": _type_of(error.status),
                "param": error.param,
                "code": error.code,
            }
        }

    def error_events(self, error: GatewayError) -> Iterator[bytes]:
        yield server_sent_event(self.error(error))


def _unenforced(body: Mapping[str, Any], choice: Any) -> Iterator[str]:
    """What a request asks for and doesn't get."""
    if isinstance(choice, Mapping):
        yield "tool_choice of one tool"
    elif choice not in (None, "auto", "none"):
        if choice != "required":
            raise GatewayError(
                f"`tool_choice` is {str(choice)[:80]!r}; it must be none, auto, required or a tool",
                param="tool_choice",
            )
        yield "tool_choice required"
    if body.get("parallel_tool_calls") is False:
        yield "parallel_tool_calls false"
    response_format = body.get("response_format") or {"type": "text"}
    if not isinstance(response_format, Mapping):
        raise GatewayError("`response_format` must be an object", param="response_format")
    if response_format.get("type") != "text":
        yield "response_format"
    yield from (name for name in _UNENFORCED if body.get(name))


def _head(request: ModelRequest, name: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{name}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _calls(choice: Choice) -> list[dict[str, Any]]:
    calls = []
    for call in choice.message.get("tool_calls") or ():
        function = call["function"]
        arguments = arguments_text(function["arguments"])
        calls.append(
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return calls


def _message(choice: Choice) -> dict[str, Any]:
    calls = _calls(choice)
    text = choice.message["content"]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = calls
    if choice.message.get("reasoning_content"):
        message["reasoning_content"] = choice.message["reasoning_content"]
    return message


def _deltas(choice: Choice) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if choice.message.get("reasoning_content"):
        yield {"reasoning_content": choice.message["reasoning_content"]}
    if choice.message["content"] or choice.logprobs:
        yield {"content": choice.message["content"]}
    calls = _calls(choice)
    if calls:
        yield {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    tokens = [
        {"token": token, "logprob": logprob, "bytes": token_bytes and list(token_bytes), "top_logprobs": []}
        for token, logprob, token_bytes in choice.logprobs
    ]
    return {"content": tokens, "refusal": None}


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """The prompt counts once, however many answers it has."""
    prompt = choices[0].usage.prompt
    response = sum(choice.usage.response for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
        "prompt_tokens_details": {"cached_tokens": choices[0].usage.reused},
    }


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    if status >= 500:
        return "server_error"
    return "invalid_request_error"
