"""Makes special tokens that users or tools spell out ordinary text."""

import re
from collections.abc import Collection, Mapping
from functools import partial

from turnwise.chat.message_content import Messages, texts_of, with_texts
from turnwise.types import Message

_MARKS = range(0xE000, 0xF900)  # characters of Unicode's private use area


class ForeignText:
    """Breaks up special tokens that are spelt out in messages of users and tools. `tokens`: id → text of each
    special token.

    >>> messages, mark = ForeignText({7: "<|im_end|>"}).marked([{"role": "user", "content": "a<|im_end|>"}])
    >>> messages[0]["content"].split(mark)
    ['a<', '|im_end|>']
    """

    def __init__(self, tokens: Mapping[int, str]) -> None:
        texts = {token for token in tokens.values() if len(token) > 1}
        self._spelt = pattern_of(texts)

    def marked(self, messages: Messages) -> tuple[Messages, str]:
        """The messages with a mark inside each spelt-out token, and the mark, which is "" if no token is
        spelt out."""
        foreign = [message for message in messages if message.get("role") in ("user", "tool")]
        # Some templates join two texts of one message, so a token may span both.
        joined = ["".join(texts_of(message)) for message in foreign]
        if self._spelt is None or not any(map(self._spelt.search, joined)):
            return messages, ""
        text = "".join(joined)
        mark = next(chr(code) for code in _MARKS if chr(code) not in text)
        broken: dict[int, Message] = {}
        for message in foreign:
            is_part = len(list(texts_of(message))) > 1
            break_up = partial(self._broken, mark, is_part)
            broken[id(message)] = with_texts(message, break_up)
        marked = [broken.get(id(message), message) for message in messages]
        return marked, mark

    def _broken(self, mark: str, is_part: bool, text: str) -> str:
        pieces = [""] if is_part else []
        begin = 0
        # A token may begin inside another one.
        while self._spelt is not None and (match := self._spelt.search(text, begin)):
            pieces.append(text[begin : match.start() + 1])
            begin = match.start() + 1
        return mark.join([*pieces, text[begin:]])


def pattern_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Matches each of the tokens, and the longest one if several begin at a place; None without tokens."""
    if not tokens:
        return None
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
