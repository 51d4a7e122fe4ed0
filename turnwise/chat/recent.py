"""A cache of the ids of recently rendered messages: siblings read the same ones, and states recur."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Message

Key = tuple[tuple[str, str], ...]


class RecentIds:
    """Ids by messages, up to `max_tokens` tokens in all; the oldest are dropped first.

    >>> recent = RecentIds(max_tokens=3)
    >>> up, down = (("user", "up"),), (("user", "down"),)
    >>> recent.keep(up, [1, 2])
    >>> recent.keep(down, [3, 4])
    >>> recent.of(up), recent.of(down)
    (None, [3, 4])
    """

    def __init__(self, max_tokens: int = 2**19) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._ids: dict[Key, tuple[int, ...]] = {}

    def of(self, key: Key) -> list[int] | None:
        kept = self._ids.get(key)
        return None if kept is None else list(kept)

    def keep(self, key: Key, token_ids: Sequence[int]) -> None:
        self._ids[key] = tuple(token_ids)
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._ids.pop(next(iter(self._ids))))


def key_of(messages: Sequence[Message]) -> Key | None:
    """The key of messages that are a role and a text; None if they hold more.

    >>> key_of([{"role": "user", "content": "Where to?"}])
    (('user', 'Where to?'),)
    >>> key_of([{"role": "tool", "content": "4", "tool_call_id": "a"}])
    """
    key = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if len(message) != 2 or not isinstance(role, str) or not isinstance(content, str):
            return None
        key.append((role, content))
    return tuple(key)
