"""Text from outside. Special tokens spelt out in it stay text, so that nobody can forge a turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from turnwise.chat.rendering import texts_of, with_texts
from turnwise.types import Message

_MARKS = range(0xE000, 0xF900)
"""Characters of Unicode's private use area."""


class ForeignText:
    """Breaks up special tokens spelt out in messages of users and tools. `tokens` are the tokenizer's.

    >>> messages, mark = ForeignText({7: "<|im_end|>"}).marked([{"role": "user", "content": "a<|im_end|>"}])
    >>> messages[0]["content"].split(mark)
    ['a<', '|im_end|>']
    """

    def __init__(self, tokens: Mapping[int, str]) -> None:
        spelt = sorted({token for token in tokens.values() if len(token) > 1}, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, spelt))) if spelt else None

    def marked(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """The messages with a mark inside each spelt-out token, and the mark; "" if there is no such token."""
        told = [message for message in messages if message.get("role") in ("user", "tool")]
        texts = [text for message in told for text in texts_of(message)]
        # Some templates write two texts of one message side by side.
        joined = ["".join(texts_of(message)) for message in told]
        if self._spelt is None or not any(self._spelt.search(text) for text in joined):
            return messages, ""
        mark = next(chr(code) for code in _MARKS if not any(chr(code) in text for text in texts))
        broken = {id(m): with_texts(m, partial(self._broken, mark, len(list(texts_of(m))) > 1)) for m in told}
        return [broken.get(id(message), message) for message in messages], mark

    def _broken(self, mark: str, is_part: bool, text: str) -> str:
        pieces, begin = [""] if is_part else [], 0
        # A token may begin inside another one.
        while self._spelt is not None and (found := self._spelt.search(text, begin)):
            pieces.append(text[begin : found.start() + 1])
            begin = found.start() + 1
        return mark.join([*pieces, text[begin:]])
