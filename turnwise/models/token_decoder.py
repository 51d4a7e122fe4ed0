"""Names the tokens of a model folder for readers, without transformers, which takes seconds to import."""

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from turnwise.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\u2581"
"""What stands for a blank in the tokens of SentencePiece."""


def has_tokens(folder: Path) -> bool:
    """Whether a folder has a tokenizer that `TokenDecoder` reads."""
    return (folder / "tokenizer.json").is_file()


class TokenDecoder:
    """The texts of a folder's tokens. Raises ModelError if its tokenizer.json can't be read."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; name a model folder with a fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as fault:  # the library raises nothing more particular
            raise ModelError(f"{file} can't be read: {fault}") from fault
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._bytes = _bytes_by_letter()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. A single token keeps its blank in front."""
        if len(token_ids) == 1:
            piece = self._tokenizer.id_to_token(token_ids[0])
            if piece is None:
                return ""
            if token_ids[0] in self.special_ids:
                return piece
            if _BLANK in piece:
                return piece.replace(_BLANK, " ")
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token of a byte-level tokenizer; None if it is of another kind."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        match = _BYTE.fullmatch(piece)
        if match:
            return bytes.fromhex(match[1])
        if not all(letter in self._bytes for letter in piece):
            return None
        return bytes(self._bytes[letter] for letter in piece)


def _bytes_by_letter() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2): printable ones stand for themselves,
    the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    letters |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return letters
