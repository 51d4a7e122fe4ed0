"""State keys in JSON. Keys that were equal when written are equal when read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, repr=False)
class WrittenKey:
    """Stands for a key that JSON can't hold; equal keys of a group have the same number."""

    number: int
    text: str = field(compare=False)

    def __repr__(self) -> str:
        return self.text


class StateKeyWriter:
    """Writes the keys of one group; keys are only compared within a group.

    Text, numbers, None, bytes and tuples of these are restored; any other object becomes a `WrittenKey`.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def encode(self, key: Hashable) -> Any:
        """
        >>> keys = StateKeyWriter()
        >>> keys.encode((1, b"door")), keys.encode(frozenset({3})), keys.encode(frozenset({3}))["object"]
        ({'tuple': [1, {'bytes': '646f6f72'}]}, {'object': 0, 'text': 'frozenset({3})'}, 0)
        """
        if isinstance(key, np.generic):
            key = key.item()
        if key is None or isinstance(key, str | int | float):
            return key
        if isinstance(key, bytes):
            return {"bytes": key.hex()}
        if isinstance(key, tuple):
            return {"tuple": [self.encode(part) for part in key]}
        return {"object": self._numbers.setdefault(key, len(self._numbers)), "text": repr(key)}


def read_state_key(value: Any) -> Hashable:
    """The key that `StateKeyWriter.encode` encoded.

    Raises:
        ValueError: `encode` didn't write it.
    """
    match value:
        case None | str() | int() | float():
            return value
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case {"tuple": list(parts)}:
            return tuple(read_state_key(part) for part in parts)
        case {"object": int(number), "text": str(text)}:
            return WrittenKey(number, text)
    raise ValueError(f"{value!r} is no state key")
