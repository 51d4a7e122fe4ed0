"""How a chat template ends the turns of an assistant: answers, and messages with tool calls.

Everything is read from renderings of made-up messages, and only from what the template writes before the
made-up text of the next message. Behind that text stands what belongs to other turns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from turnwise.chat.codec import TextCodec
from turnwise.chat.rendering import MADE_UP, SENTINEL, Renderer, as_part, shows, texts_of
from turnwise.chat.thinking_tags import is_thinking_tag, thinking_and_answer
from turnwise.errors import ChatTemplateError
from turnwise.types import Message

BEFORE = "\n"
"""Stands for sampled text before an encoded text. No vocabulary merges it with what follows."""
THOUGHT = f"{MADE_UP}thought"
THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys in which published templates look for an assistant's thinking."""
ASKED = f"{MADE_UP}asked"
_NEXT = f"{MADE_UP}next"
_CALL_ID = "call00000"
_NAME = "look"


class Ends(NamedTuple):
    """The end of an assistant's turn in a template."""

    closing: list[int]
    """The ids that follow an answer before another message, up to the token that ends the turn; empty without
    such a token."""
    said: list[int]
    """The ids that follow the last answer of a conversation, up to the token that ends the turn. Fine-tuning
    teaches these."""


class AddedToken(NamedTuple):
    """A token that the tokenizer never splits."""

    token_id: int
    text: str


def message_of(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def continued(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The messages before a response, and the words with which the response begins: those of a last
    assistant's message. Raises ChatTemplateError if this message has tool calls, which only a result can
    follow."""
    if not messages or messages[-1].get("role") != "assistant":
        return messages, ""
    if messages[-1].get("tool_calls"):
        raise ChatTemplateError(
            "the last message has tool calls: put a result of role tool behind it for each call"
        )
    return messages[:-1], "".join(texts_of(messages[-1]))


class TurnEnds:
    """Finds the ends of an assistant's turns. `known_ends` are the ids that the tokenizer and the generation
    config call ends. Raises ChatTemplateError if the template drops the text of assistant messages."""

    def __init__(self, renderer: Renderer, codec: TextCodec, known_ends: Sequence[int]) -> None:
        self._renderer = renderer
        self._codec = codec
        self._known_ends = known_ends
        self.prefix = self._shown_prefix()
        """A user's message and the sentinel as its answer, in the form (strings or lists of parts) that the
        template shows."""

    @property
    def takes_parts(self) -> bool:
        """Whether messages of plain strings have to be given as lists of parts."""
        return isinstance(self.prefix[0]["content"], list)

    @cached_property
    def answers(self) -> Ends:
        """How answers end. If the ids after an answer in mid-conversation and those after the last answer
        agree up to a special token (an EOS token if possible), both ends are these ids. Otherwise each end
        goes up to its own first special token. A token with which only the next role's messages begin is no
        end where the last answer has an end of its own."""
        tail = self._separator_ids(self.prefix, self._message("user"))
        last = self._codec.encode(self.text(self.prefix).partition(SENTINEL)[2], after=BEFORE)
        common = [
            ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(tail, last, strict=False))
        ]
        added = [index for index, token_id in enumerate(common) if token_id in self._codec.added_tokens]
        known = [index for index in added if common[index] in self._known_ends]
        ends = [index for index in added if common[index] not in self.between_thought_and_answer]
        if added:
            both = common[: (known or ends or added)[0] + 1]
            return Ends(both, both)
        first, first_of_last = self.first_added(tail), self.first_added(last)
        closing = [] if first is None else tail[: first + 1]
        if first_of_last is None:
            return Ends(closing, closing)
        if closing and closing[-1] not in self._known_ends and self._begins_one_role(closing[-1]):
            closing = []
        return Ends(closing, last[: first_of_last + 1])

    @cached_property
    def ends_with_next_role(self) -> bool:
        """Whether no token ends an answer but the one with which the next role's message begins."""
        said = self.answers.said
        return bool(said) and said == self.answers.closing and self._begins_one_role(said[-1])

    @cached_property
    def between_thought_and_answer(self) -> list[int]:
        """The ids between an assistant's thinking and its answer."""
        user, sentinel = self.prefix
        before = self.text([user, sentinel | dict.fromkeys(THINKING_KEYS, THOUGHT)]).partition(SENTINEL)[0]
        return self._codec.encode(before.partition(THOUGHT)[2])

    @cached_property
    def calls(self) -> AddedToken | None:
        """The token that ends a message with tool calls; None if calls aren't shown, or nothing marks their
        end."""
        called = self.called({})
        last = self.text(called).partition(SENTINEL)[2]
        separators = [self._separator(called, message) for message in (self._result(), self._message("user"))]
        separator = next((text for text in separators if text is not None), "")
        common = _common_prefix(separator, last)
        known = set(self._known_ends)
        if not self.ends_with_next_role:
            known.update(self.answers.said[-1:])
        for text in (common, last, separator):
            for _, end in self._added_in(text):
                if end.token_id in known:
                    return end
        for _, end in reversed(list(self._added_in(common))):
            if self._stands_once(end.text, called):
                return end
        if self.answers.closing:
            for start, end in self._added_in(separator):
                if start >= len(common):
                    return end
        return None

    @cached_property
    def results_need_call(self) -> bool:
        """Whether a tool's result has to be rendered after a call: the template shows it only there, or ends
        a call by another token than an answer."""
        result = self._result()
        shown = [self._separator(prefix, result) is not None for prefix in (self.prefix, self.called(result))]
        if shown != [True, True]:
            return shown[1]
        closing = self.answers.closing
        return self.calls is not None and bool(closing) and self.calls.token_id != closing[-1]

    @cached_property
    def turn_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that begin or end turns: those that the template writes between messages, and
        around an answer. Tags of thinking aren't among them; nor are marks of calls and results, which stand
        inside a turn."""
        user, sentinel = self.prefix
        texts = [self.text([user], is_last=False).partition(ASKED)[2]]
        texts += [
            self._separator(self.prefix, self._message(role)) or ""
            for role in ("user", "system", "assistant")
        ]
        texts.append(self.text(self.prefix).partition(ASKED)[2])
        texts.append(
            self.text([user, sentinel, user], is_last=False).partition(ASKED)[2].partition(SENTINEL)[0]
        )
        token_ids = {
            token.token_id
            for text in texts
            for _, token in self._added_in(text)
            if not is_thinking_tag(token.text)
        }
        before_result = next(self._added_in(self._separator(self.prefix, self._result()) or ""), None)
        ends = [end for end in (self.calls, before_result and before_result[1]) if end is not None]
        return frozenset(token_ids | {end.token_id for end in ends} | set(self._known_ends))

    def called(self, result: Message) -> tuple[Message, Message]:
        """`prefix` with a made-up call, whose argument is the sentinel, and whose name and id are those of
        the `result`."""
        function = {"name": result.get("name") or _NAME, "arguments": {"a": SENTINEL}}
        call = {"id": result.get("tool_call_id", _CALL_ID), "type": "function", "function": function}
        return self.prefix[0], {"role": "assistant", "content": "", "tool_calls": [call]}

    def closing_before(self, role: str) -> list[int]:
        """The ids between an answer and a message of `role`, up to the first special token; [] if there is
        none."""
        if role not in self._closings:
            ids = self._separator_ids(self.prefix, self._message(role))
            first = self.first_added(ids)
            self._closings[role] = [] if first is None else ids[: first + 1]
        return self._closings[role]

    def first_added(self, token_ids: Sequence[int]) -> int | None:
        """The position of the first token that the tokenizer never splits."""
        added = self._codec.added_tokens
        return next((index for index, token_id in enumerate(token_ids) if token_id in added), None)

    def text(
        self, messages: Sequence[Message], is_last: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The rendered messages, without a header for another response if `is_last`; "" if the template
        refuses them."""
        try:
            return self._renderer.render(messages, tools, opens_answer=not is_last)
        except ChatTemplateError:
            return ""

    def texts_with_calls(self, message: Message) -> Iterator[str]:
        """Renderings of a user's message and `message` up to the end of its tool calls: followed by results,
        by a user's message, and by nothing. Some templates refuse one of these, or write thinking into the
        last message."""
        end = self.calls
        if end is None:
            return
        called = self.called({})
        for followers in (self._results(message), [self._message("user")], []):
            text = self.text([self.prefix[0], message, *followers], is_last=not followers)
            if followers:
                text, is_there, _ = text.partition(_NEXT)
                made_up = self._separator(called, followers[0]) if is_there else None
            else:
                made_up = self.text(called).partition(SENTINEL)[2]
            positions = [place.start() for place in re.finditer(re.escape(end.text), text)]
            # The first one in the made-up rendering is the end; each later one belongs to what follows.
            num_later = (made_up or "").count(end.text) - 1
            if 0 <= num_later < len(positions):
                yield text[: positions[-1 - num_later] + len(end.text)]

    @cached_property
    def _closings(self) -> dict[str, list[int]]:
        return {}

    def _begins_one_role(self, token_id: int) -> bool:
        """Whether another token stands first between an answer and a message of another role than a
        user's."""
        separators = [self._separator(self.prefix, self._message(role)) for role in ("system", "assistant")]
        separators.append(self._separator(self.prefix, self._result()))
        firsts = [next(self._added_in(text), None) for text in separators if text is not None]
        return any(first is None or first[1].token_id != token_id for first in firsts)

    def _stands_once(self, token: str, called: Sequence[Message]) -> bool:
        """Whether a message of two calls has the token no more often than a message of one call."""
        user, message = called
        both = {**message, "tool_calls": [*message["tool_calls"], *message["tool_calls"]]}
        num_in_one, num_in_both = (self.text([user, said]).count(token) for said in (message, both))
        return num_in_both <= num_in_one

    def _added_in(self, text: str) -> Iterator[tuple[int, AddedToken]]:
        """The position and the token of each token in the text that the tokenizer never splits."""
        if self._spelt_tokens is not None:
            for token in self._spelt_tokens.finditer(text):
                yield token.start(), AddedToken(self._id_of_token[token.group()], token.group())

    @cached_property
    def _id_of_token(self) -> dict[str, int]:
        return {token: token_id for token_id, token in self._codec.added_tokens.items()}

    @cached_property
    def _spelt_tokens(self) -> re.Pattern[str] | None:
        tokens = sorted(self._id_of_token, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def _separator_ids(self, prefix: Sequence[Message], message: Message) -> list[int]:
        return self._codec.encode(self._separator(prefix, message) or "", after=BEFORE)

    def _separator(self, prefix: Sequence[Message], message: Message) -> str | None:
        """What the template writes between the sentinel in the prefix and the made-up text of `message`; None
        if it refuses the message or doesn't show it there."""
        after = self.text([*prefix, message], is_last=False).partition(SENTINEL)[2]
        before, is_there, _ = after.partition(_NEXT)
        return before if is_there else None

    def _message(self, role: str) -> Message:
        return message_of(role, as_part(_NEXT) if self.takes_parts else _NEXT)

    def _result(self) -> Message:
        return {**self._message("tool"), "name": _NAME, "tool_call_id": _CALL_ID}

    def _results(self, message: Message) -> list[Message]:
        results = []
        for call in message["tool_calls"]:
            name = call.get("function", call).get("name")
            results.append({**self._message("tool"), "name": name, "tool_call_id": call.get("id", _CALL_ID)})
        return results

    def _shown_prefix(self) -> tuple[Message, Message]:
        refusal = "it drops the text of assistant messages"
        forms = (str, as_part)
        for form in forms:
            user, sentinel = message_of("user", form(ASKED)), message_of("assistant", form(SENTINEL))
            try:
                if SENTINEL in self._renderer.render([user, sentinel, user]) and self._renderer.accepts(
                    form(SENTINEL)
                ):
                    return user, sentinel
            except ChatTemplateError as error:
                refusal = str(error)
        raise ChatTemplateError(
            f"a context can't be extended with this chat template ({refusal}): one that renders user → "
            f"assistant → user and "
            "keeps each text is needed"
        )


def _common_prefix(first: str, second: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in pairs)


def is_taught(message: Message, text: str) -> bool:
    """Whether `text` shows the name and the arguments of each call in `message`, its thinking and content
    before the last call, and nothing made-up."""
    functions = [call.get("function", call) for call in message["tool_calls"]]
    leaves = [
        leaf for function in functions for leaf in (function.get("name"), *_leaves(function.get("arguments")))
    ]
    before = text.rpartition(str(functions[-1].get("name")))[0] or text
    contents = [part for said in texts_of(message) for part in thinking_and_answer(said)]
    is_made_up = any(made_up in text for made_up in (ASKED, _NEXT))
    return (
        not is_made_up
        and all(shows(str(leaf), text) for leaf in leaves)
        and all(shows(part, before) for part in contents)
    )


def _leaves(value: Any) -> Iterator[Any]:
    """The keys, texts and numbers in a call's arguments. Templates write booleans and null as JSON or as
    Python."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value
