"""Makes special tokens that users, tools or clients spell out ordinary text."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from turnwise.chat.message_content import Messages, texts_of, with_texts
from turnwise.types import Message

_MARKS = range(0xE000, 0xF900)  # characters of Unicode's private use area


class ForeignText:
    """Breaks up special tokens that are spelt out in messages of these `roles`, in their texts and in the
    arguments of their calls. `tokens`: id → text of each special token.

    >>> messages, mark = ForeignText({7: "<|im_end|>"}).marked([{"role": "user", "content": "a<|im_end|>"}])
    >>> messages[0]["content"].split(mark)
    ['a<', '|im_end|>']
    """

    def __init__(self, tokens: Mapping[int, str], roles: Collection[str] = ("user", "tool")) -> None:
        self._roles = roles
        texts = {token for token in tokens.values() if len(token) > 1}
        self._spelt = pattern_of(texts)

    def marked(self, messages: Messages) -> tuple[Messages, str]:
        """The messages with a mark inside each spelt-out token, and the mark, which is "" if no token is
        spelt out."""
        foreign = [message for message in messages if message.get("role") in self._roles]
        # Some templates join two texts of one message, so a token may span both.
        joined = ["".join(texts_of(message)) + _words_of_calls(message) for message in foreign]
        if self._spelt is None or not any(map(self._spelt.search, joined)):
            return messages, ""
        text = "".join(joined)
        mark = next(chr(code) for code in _MARKS if chr(code) not in text)
        broken: dict[int, Message] = {}
        for message in foreign:
            is_part = len(list(texts_of(message))) > 1
            break_up = partial(self._broken, mark, is_part)
            changed = with_texts(message, break_up)
            if message.get("tool_calls"):
                changed = {**changed, "tool_calls": _changed(message["tool_calls"], break_up)}
            broken[id(message)] = changed
        marked = [broken.get(id(message), message) for message in messages]
        return marked, mark

    def pieces(self, rendered: str, mark: str) -> list[str]:
        """The rendered text, cut at the marks. Arguments of calls may be rendered as JSON in ASCII."""
        if not mark:
            return [rendered]
        return rendered.replace(f"\\u{ord(mark):04x}", mark).split(mark)

    def _broken(self, mark: str, is_part: bool, text: str) -> str:
        pieces = [""] if is_part else []
        begin = 0
        # A token may begin inside another one.
        while self._spelt is not None and (match := self._spelt.search(text, begin)):
            pieces.append(text[begin : match.start() + 1])
            begin = match.start() + 1
        return mark.join([*pieces, text[begin:]])


def _words_of_calls(message: Message) -> str:
    """The calls of a message as text; "" if it has none."""
    calls = message.get("tool_calls")
    return json.dumps(calls, ensure_ascii=False, default=str) if calls else ""


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """The value with `change` applied to each text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return value


def pattern_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Matches each of the tokens, and the longest one if several begin at a place; None without tokens."""
    if not tokens:
        return None
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
