"""Finds chat templates that write earlier turns differently once they are history. Contexts are only appended
to, so there the model reads another text than the template would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from turnwise.chat.rendering import SENTINEL, Renderer, Tools, as_part
from turnwise.chat.thinking_tags import opened_by
from turnwise.chat.turn_ends import THINKING_KEYS, THOUGHT, TurnEnds, message_of
from turnwise.errors import ChatTemplateError
from turnwise.types import Message

_LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"side": {"type": "string", "description": "Which."}},
        "required": ["side"],
    },
}
_TOOLS = [{"type": "function", "function": _LOOK}]
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"side": "left"}}}


class Appending(Protocol):
    """What a `ChatTemplate` does to a conversation that grows turn by turn; see there."""

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]: ...

    def extend(
        self, response_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]: ...

    def respond(self, content: str) -> list[int]: ...

    def respond_with_calls(self, message: Message) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skips_turn_tokens: bool = True) -> str: ...


def rewrites_answers(renderer: Renderer, turns: TurnEnds, header: str, lead_in: str) -> bool:
    """Whether a made-up conversation without tools is rendered differently once it is history. `header`
    stands before each response, `lead_in` between header and text."""
    user, sentinel = turns.prefix
    form: Callable[[str], Any] = as_part if turns.takes_parts else str
    thinking = dict.fromkeys(THINKING_KEYS, THOUGHT)
    thought = f"<think>\nb\n</think>\n\n{SENTINEL}"
    opened = opened_by(header)

    def rewrites(first: Sequence[Message], text: str) -> bool:
        sampled = (
            text.removeprefix(opened) if opened else ("" if "think" in lead_in.lower() else lead_in) + text
        )
        tail = renderer.shown(turns.prefix, [user])
        appended = renderer.render(first) + sampled + tail
        return renderer.render([*first, message_of("assistant", form(text)), user]) != appended

    for first in ([message_of("system", form("c")), user], [user]):
        try:
            has_thought = [
                THOUGHT in turns.text([*first, sentinel | thinking, *more], not more)
                for more in ((), (user,))
            ]
            plain = thought if opened else SENTINEL
            return has_thought == [True, False] or any(rewrites(first, text) for text in (thought, plain))
        except ChatTemplateError:
            continue
    return False


def rewrites_tools(template: Appending, turns: TurnEnds) -> bool:
    """Whether a made-up conversation with tools is rendered differently once it is history: after an answer,
    after a call, or after both. Conversations that the template refuses don't count."""
    form: Callable[[str], Any] = as_part if turns.takes_parts else str
    user, answer = message_of("user", form("c")), message_of("assistant", "d")
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": form("e")}
    conversations = ([user, answer, user], [user, called, result], [user, called, result, answer, user])
    return any(_differs(template, messages) for messages in conversations)


def _differs(template: Appending, messages: Sequence[Message]) -> bool:
    """Whether appending the messages one by one yields another text than rendering them at once."""
    context = []
    response: list[int] = []
    try:
        for index, message in enumerate(messages):
            if index == 0:
                context += template.start([message], _TOOLS)
            elif message["role"] != "assistant":
                context += template.extend(response, [message], _TOOLS)
            else:
                is_call = bool(message.get("tool_calls"))
                response = (
                    template.respond_with_calls(message)
                    if is_call
                    else template.respond(str(message["content"]))
                )
                context += response
        whole = template.start(messages, _TOOLS)
    except ChatTemplateError:
        return False
    return template.decode(context, False) != template.decode(whole, False)
