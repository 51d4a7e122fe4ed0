"""LangChain's messages ↔ messages in OpenAI's form."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from turnwise.chat.tree import Answer
from turnwise.errors import RequestError
from turnwise.types import Message

_THINKING = {"reasoning": "reasoning", "thinking": "thinking"}
"""Parts of an answer that hold thinking, and the key of its text."""
_CALLS = ("tool_call", "tool_use", "tool_call_chunk", "invalid_tool_call", "function_call")
"""Parts of an answer that repeat its `tool_calls`."""


def as_openai(messages: Iterable[BaseMessage]) -> list[Message]:
    """The messages in OpenAI's form. Raises RequestError for a message that no chat template has a role
    for."""
    return [_as_openai(message) for message in messages]


def as_prompt(messages: Sequence[Message]) -> list[Message]:
    """Messages in OpenAI's form as LangChain reads them: it takes the arguments of calls as JSON text."""
    read = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        read.append(message)
    return read


def as_ai_message(answer: Answer, model_name: str) -> AIMessage:
    """A sampled answer as LangChain has it. A call that can't be read is one of its `invalid_tool_calls`,
    with the error and the text in which it stands."""
    message = answer.message
    calls = []
    for call in message.get("tool_calls") or ():
        # A graph may change the arguments; what was sampled must stay.
        arguments = copy.deepcopy(call["function"]["arguments"])
        calls.append(
            {"type": "tool_call", "name": call["function"]["name"], "args": arguments, "id": call["id"]}
        )
    invalid = [
        {
            "type": "invalid_tool_call",
            "name": None,
            "args": message["content"],
            # LangChain answers invalid calls that have an id, by a result of a call that was never made.
            "id": None,
            "error": error,
        }
        for error in message.get("call_errors") or ()
    ]
    thinking = message.get("reasoning_content")
    usage = answer.usage
    return AIMessage(
        content=message["content"],
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs={"reasoning_content": thinking} if thinking else {},
        usage_metadata={
            "input_tokens": usage.prompt,
            "output_tokens": usage.response,
            "total_tokens": usage.prompt + usage.response,
            "input_token_details": {"cache_read": usage.reused},
        },
        response_metadata={
            "finish_reason": answer.finish_reason,
            "model_name": model_name,
            "turn": answer.node,
        },
    )


def _as_openai(message: BaseMessage) -> Message:
    match message:
        case HumanMessage():
            return {"role": "user", "content": _parts(message.content)}
        case SystemMessage():
            return {"role": "system", "content": _parts(message.content)}
        case AIMessage():
            return _answer(message)
        case ToolMessage():
            content = _parts(message.content)
            return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
        case ChatMessage():
            return {"role": message.role, "content": _parts(message.content)}
    raise RequestError(
        f"a message of LangChain's type {type(message).__name__} has no role in a chat template; allowed are "
        "human, system, ai and tool messages"
    )


def _answer(message: AIMessage) -> Message:
    content = _parts(message.content)
    thinking = message.additional_kwargs.get("reasoning_content") or ""
    if not isinstance(content, str):
        thinking = thinking or "".join(_thoughts(content))
        passed_over = (*_THINKING, *_CALLS)
        content = [part for part in content if part["type"] not in passed_over]
    answer: Message = {"role": "assistant", "content": content}
    if thinking:
        answer["reasoning_content"] = thinking
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    return answer


def _thoughts(parts: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for part in parts:
        if part["type"] in _THINKING:
            yield str(part.get(_THINKING[part["type"]]) or "")


def _parts(content: Any) -> Any:
    """A text, or parts each of which has a type."""
    if isinstance(content, str) or content is None:
        return content
    parts = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping) or "type" not in part:
            part = {"type": type(part).__name__}
        parts.append(part)
    return parts


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
