"""The text of single tokens. A token may be part of a character, or a special one."""

from collections.abc import Collection, Sequence
from typing import Protocol

BROKEN = "\ufffd"


class Decoder(Protocol):
    """What the pages ask of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token that isn't a whole character; None if they aren't known."""


class TokenTexts:
    """Texts of tokens, each decoded once.

    >>> class Letters:
    ...     special_ids = {0}
    ...     def decode(self, token_ids): return "".join(chr(64 + i) for i in token_ids)
    ...     def bytes_of(self, token_id): return None
    >>> TokenTexts(Letters()).text(3)
    'C'
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token's text; its bytes as hexadecimal digits in ⟨⟩ if it is part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._decoded(token_id)
            self._texts[token_id] = text
        return text

    def _decoded(self, token_id: int) -> str:
        text = self.decoder.decode([token_id])
        if BROKEN not in text:
            return text
        content = self.decoder.bytes_of(token_id)
        if content is None:
            return text
        return f"⟨{content.hex(' ')}⟩"

    def table(self, token_ids: Collection[int]) -> dict[str, str]:
        """The texts of ids by id, as JSON holds them."""
        return {str(token_id): self.text(token_id) for token_id in sorted(token_ids)}
