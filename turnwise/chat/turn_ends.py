"""How a chat template ends the turns of an assistant: answers, and messages with tool calls.

Everything is read from renderings of made-up messages, and only from what the template writes before the
made-up text of the next message. Behind that text stands what belongs to other turns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

from turnwise.chat.codec import TextCodec
from turnwise.chat.foreign_text import pattern_of
from turnwise.chat.message_content import Messages, as_part, message_of, texts_of
from turnwise.chat.rendering import MADE_UP, SENTINEL, Renderer, shows
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
    final: list[int]
    """The ids that follow the last answer of a conversation, up to the token that ends the turn. Fine-tuning
    teaches these."""


class AddedToken(NamedTuple):
    """A token that the tokenizer never splits."""

    token_id: int
    text: str


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
    def user(self) -> Message:
        """The user's message of the prefix."""
        return self.prefix[0]

    @property
    def takes_parts(self) -> bool:
        """Whether messages of plain strings have to be given as lists of parts."""
        return isinstance(self.user["content"], list)

    @cached_property
    def answers(self) -> Ends:
        """How answers end. If the ids after an answer in mid-conversation and those after the last answer
        agree up to a special token (an EOS token if possible), both ends are these ids. Otherwise each end
        goes up to its own first special token. A token with which only the next role's messages begin is no
        end where the last answer has an end of its own."""
        tail = self._separator_ids(self._message("user"))
        last = self._codec.encode(self._after_sentinel(self.prefix), context=BEFORE)
        common = tail[: _num_common(tail, last)]
        added_tokens = self._codec.added_tokens
        added = [index for index, token_id in enumerate(common) if token_id in added_tokens]
        # An EOS ends a turn for certain. Other tokens may end the thinking in it, before the answer.
        eos = [index for index in added if common[index] in self._known_ends]
        ends = [index for index in added if common[index] not in self.between_thought_and_answer]
        if added:
            index, *_ = eos or ends or added
            end = common[: index + 1]
            return Ends(end, end)
        closing = self._up_to_added(tail)
        final = self._up_to_added(last)
        # No token stands behind the last answer: what ends the others has to end this one, too.
        if not final:
            return Ends(closing, closing)
        # The last answer has an end of its own, so a token that only users' messages begin with is theirs.
        is_unknown = bool(closing) and closing[-1] not in self._known_ends
        if is_unknown and self._begins_one_role(closing[-1]):
            closing = []
        return Ends(closing, final)

    @cached_property
    def ends_with_next_role(self) -> bool:
        """Whether no token ends an answer but the one with which the next role's message begins."""
        closing, final = self.answers
        if not final or final != closing:
            return False
        return self._begins_one_role(final[-1])

    @cached_property
    def between_thought_and_answer(self) -> list[int]:
        """The ids between an assistant's thinking and its answer."""
        user, sentinel = self.prefix
        thinking = dict.fromkeys(THINKING_KEYS, THOUGHT)
        text = self.text([user, sentinel | thinking])
        head, _, _ = text.partition(SENTINEL)
        return self._codec.encode(_behind(head, THOUGHT))

    @cached_property
    def calls(self) -> AddedToken | None:
        """The token that ends a message with tool calls; None if calls aren't shown, or nothing marks their
        end."""
        called = self.called({})
        last = self._after_sentinel(called)
        separator = self._separator(self._result(), called)
        if separator is None:
            separator = self._separator(self._message("user"), called) or ""
        common = separator[: _num_common(separator, last)]
        ends = set(self._known_ends)
        # A token of the next role's header says nothing about the calls before it.
        if not self.ends_with_next_role:
            ends.update(self.answers.final[-1:])
        for text in (common, last, separator):
            for _, end in self._added_in(text):
                if end.token_id in ends:
                    return end
        # A token that each call has is the end of one call; the end of all stands once, behind them.
        for _, end in reversed(list(self._added_in(common))):
            if self._stands_once(end.text, called):
                return end
        # Where answers have an end in mid-conversation, calls may have one there that a last message lacks.
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
        is_shown_after_answer = self._separator(result) is not None
        is_shown_after_call = self._separator(result, self.called(result)) is not None
        if not (is_shown_after_answer and is_shown_after_call):
            return is_shown_after_call
        closing = self.answers.closing
        if self.calls is None or not closing:
            return False
        return self.calls.token_id != closing[-1]

    @cached_property
    def turn_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that begin or end turns: those that the template writes between messages, and
        around an answer. Tags of thinking aren't among them; nor are marks of calls and results, which stand
        inside a turn."""
        user, sentinel = self.prefix
        in_the_middle = _behind(self.text([user, sentinel, user], is_last=False), ASKED)
        header, _, _ = in_the_middle.partition(SENTINEL)
        texts: list[str | None] = [
            _behind(self.text([user], is_last=False), ASKED),
            _behind(self.text(self.prefix), ASKED),
            header,
        ]
        for role in ("user", "system", "assistant"):
            texts.append(self._separator(self._message(role)))
        token_ids = set(self._known_ends)
        for text in texts:
            for _, token in self._added_in(text):
                if not is_thinking_tag(token.text):
                    token_ids.add(token.token_id)
        # Before a result only the first token ends a turn; the others mark the result.
        before_result = self._separator(self._result())
        for _, token in islice(self._added_in(before_result), 1):
            token_ids.add(token.token_id)
        if self.calls is not None:
            token_ids.add(self.calls.token_id)
        return frozenset(token_ids)

    def called(self, result: Message) -> tuple[Message, Message]:
        """`prefix` with a made-up call, whose argument is the sentinel, and whose name and id are those of
        the `result`."""
        name = result.get("name") or _NAME
        call = {
            "id": result.get("tool_call_id", _CALL_ID),
            "type": "function",
            "function": {"name": name, "arguments": {"a": SENTINEL}},
        }
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self.user, message

    def closing_before(self, role: str) -> list[int]:
        """The ids between an answer and a message of `role`, up to the first special token; [] if there is
        none."""
        if role not in self._closings:
            separator_ids = self._separator_ids(self._message(role))
            self._closings[role] = self._up_to_added(separator_ids)
        return self._closings[role]

    def first_added(self, token_ids: Sequence[int]) -> int | None:
        """The position of the first token that the tokenizer never splits."""
        for index, token_id in enumerate(token_ids):
            if token_id in self._codec.added_tokens:
                return index
        return None

    def _up_to_added(self, token_ids: list[int]) -> list[int]:
        """The ids up to the first token that the tokenizer never splits, with it; [] if there is none."""
        first = self.first_added(token_ids)
        if first is None:
            return []
        return token_ids[: first + 1]

    def text(
        self,
        messages: Messages,
        is_last: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
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
        any_message = [self._message("user")]
        for followers in (self._results(message), any_message, []):
            text = self.text([self.user, message, *followers], is_last=not followers)
            if followers and _NEXT not in text:
                continue
            if followers:
                text, _, _ = text.partition(_NEXT)
                made_up = self._separator(followers[0], called) or ""
            else:
                made_up = self._after_sentinel(called)
            positions = [match.start() for match in re.finditer(re.escape(end.text), text)]
            # The first one in the made-up rendering is the end; each later one belongs to what follows.
            num_later = made_up.count(end.text) - 1
            if 0 <= num_later < len(positions):
                yield text[: positions[-1 - num_later] + len(end.text)]

    @cached_property
    def _closings(self) -> dict[str, list[int]]:
        return {}

    def _begins_one_role(self, token_id: int) -> bool:
        """Whether another token stands first between an answer and a message of another role than a
        user's."""
        for message in (self._message("system"), self._message("assistant"), self._result()):
            separator = self._separator(message)
            if separator is None:
                continue
            first = next(self._added_in(separator), None)
            if first is None or first[1].token_id != token_id:
                return True
        return False

    def _stands_once(self, token: str, called: Messages) -> bool:
        """Whether a message of two calls has the token no more often than a message of one call."""
        user, one_call = called
        two_calls = {**one_call, "tool_calls": one_call["tool_calls"] * 2}
        num_of_two = self.text([user, two_calls]).count(token)
        return num_of_two <= self.text([user, one_call]).count(token)

    def _added_in(self, text: str | None) -> Iterator[tuple[int, AddedToken]]:
        """The position and the token of each token in the text that the tokenizer never splits."""
        if self._spelt_tokens is None or text is None:
            return
        for match in self._spelt_tokens.finditer(text):
            token = match.group()
            yield match.start(), AddedToken(self._id_of_token[token], token)

    @cached_property
    def _id_of_token(self) -> dict[str, int]:
        return {token: token_id for token_id, token in self._codec.added_tokens.items()}

    @cached_property
    def _spelt_tokens(self) -> re.Pattern[str] | None:
        return pattern_of(self._id_of_token)

    def _after_sentinel(self, messages: Messages) -> str:
        """What the template writes behind the sentinel in the last message."""
        return _behind(self.text(messages), SENTINEL)

    def _separator_ids(self, message: Message) -> list[int]:
        separator = self._separator(message) or ""
        return self._codec.encode(separator, context=BEFORE)

    def _separator(self, message: Message, prefix: Messages = ()) -> str | None:
        """What the template writes between the sentinel in the prefix (by default an answer) and the made-up
        text of `message`; None if it refuses the message or doesn't show it there."""
        messages = [*(prefix or self.prefix), message]
        tail = _behind(self.text(messages, is_last=False), SENTINEL)
        separator, is_there, _ = tail.partition(_NEXT)
        return separator if is_there else None

    def _message(self, role: str) -> Message:
        content = as_part(_NEXT) if self.takes_parts else _NEXT
        return message_of(role, content)

    def _result(self) -> Message:
        return {**self._message("tool"), "name": _NAME, "tool_call_id": _CALL_ID}

    def _results(self, message: Message) -> list[Message]:
        results = []
        for call in message["tool_calls"]:
            result = self._result()
            result["name"] = call.get("function", call).get("name")
            result["tool_call_id"] = call.get("id", _CALL_ID)
            results.append(result)
        return results

    def _shown_prefix(self) -> tuple[Message, Message]:
        refusal = "it drops the text of assistant messages"
        forms = (str, as_part)
        for form in forms:
            user = message_of("user", form(ASKED))
            sentinel = message_of("assistant", form(SENTINEL))
            try:
                is_shown = SENTINEL in self._renderer.render([user, sentinel, user])
                if is_shown and self._renderer.accepts(form(SENTINEL)):
                    return user, sentinel
            except ChatTemplateError as error:
                refusal = str(error)
        raise ChatTemplateError(
            f"a context can't be extended with this chat template ({refusal}): one that renders user → "
            "assistant → user and keeps each text is needed"
        )


def _behind(text: str, mark: str) -> str:
    """What stands behind the first `mark`; "" if there is none."""
    return text.partition(mark)[2]


def _num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items at the beginning of both are equal."""
    pairs = zip(first, second, strict=False)
    equal = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(list(equal))


def is_taught(message: Message, text: str) -> bool:
    """Whether `text` shows the name and the arguments of each call in `message`, its thinking and content
    before the last call, and nothing made-up."""
    if ASKED in text or _NEXT in text:
        return False
    functions = [call.get("function", call) for call in message["tool_calls"]]
    for function in functions:
        leaves = [function.get("name"), *_leaves(function.get("arguments"))]
        if not all(shows(str(leaf), text) for leaf in leaves):
            return False
    # A response ends with its calls, so its content has to stand before them.
    last_name = str(functions[-1].get("name"))
    head, _, _ = text.rpartition(last_name)
    contents = chain.from_iterable(map(thinking_and_answer, texts_of(message)))
    return all(shows(part, head or text) for part in contents)


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
