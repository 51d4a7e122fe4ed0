"""Finds chat templates that write earlier turns differently once they are history. Contexts are only appended
to, so there the model reads another text than the template would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from turnwise.chat.message_content import Messages, as_part, message_of
from turnwise.chat.rendering import SENTINEL, Renderer, Tools
from turnwise.chat.thinking_tags import opened_by
from turnwise.chat.turn_ends import THINKING_KEYS, THOUGHT, TurnEnds
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
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "look", "arguments": {"side": "left"}},
}


class Appending(Protocol):
    """What a `ChatTemplate` does to a conversation that grows turn by turn; see there."""

    def start(self, messages: Messages, tools: Tools = ()) -> list[int]: ...

    def extend(self, response_ids: Sequence[int], new_messages: Messages, tools: Tools = ()) -> list[int]: ...

    def respond_with(self, message: Message) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skips_turn_tokens: bool = True) -> str: ...


def rewrites_answers(
    renderer: Renderer,
    turns: TurnEnds,
    header: str,
    lead_in: str,
) -> bool:
    """Whether a made-up conversation without tools is rendered differently once it is history. `header`
    stands before each response, `lead_in` between header and text."""
    user, sentinel = turns.prefix
    form: Callable[[str], Any] = as_part if turns.takes_parts else str
    thinking = dict.fromkeys(THINKING_KEYS, THOUGHT)
    thought = f"<think>\nb\n</think>\n\n{SENTINEL}"
    opened = opened_by(header)

    def rewrites(first: Messages, text: str) -> bool:
        if opened:
            sampled = text.removeprefix(opened)
        elif "think" in lead_in.lower():
            sampled = text
        else:
            sampled = lead_in + text
        tail = renderer.shown(turns.prefix, [user])
        appended = renderer.render(first) + sampled + tail
        answer = message_of("assistant", form(text))
        return renderer.render([*first, answer, user]) != appended

    def drops_thinking(first: Messages) -> bool:
        answered = [*first, sentinel | thinking]
        shows_last = THOUGHT in turns.text(answered)
        shows_earlier = THOUGHT in turns.text([*answered, user], is_last=False)
        return shows_last and not shows_earlier

    for first in ([message_of("system", form("c")), user], [user]):
        try:
            plain = thought if opened else SENTINEL
            return drops_thinking(first) or rewrites(first, thought) or rewrites(first, plain)
        except ChatTemplateError:
            # Some templates refuse system messages.
            continue
    return False


def rewrites_tools(template: Appending, turns: TurnEnds) -> bool:
    """Whether a made-up conversation with tools is rendered differently once it is history: after an answer,
    after a call, or after both. Conversations that the template refuses don't count."""
    form: Callable[[str], Any] = as_part if turns.takes_parts else str
    user = message_of("user", form("c"))
    answer = message_of("assistant", "d")
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": form("e")}
    conversations = (
        [user, answer, user],
        [user, called, result],
        [user, called, result, answer, user],
    )
    return any(_differs(template, messages) for messages in conversations)


def _differs(template: Appending, messages: Messages) -> bool:
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
                response = template.respond_with(message)
                context += response
        whole = template.start(messages, _TOOLS)
    except ChatTemplateError:
        return False
    return template.decode(context, False) != template.decode(whole, False)
