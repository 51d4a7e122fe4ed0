"""The bytes of a token, by the piece that its tokenizer names it with."""

import re

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_of_piece(piece: str) -> bytes | None:
    """The bytes of a piece of a byte-level tokenizer, or of a byte that SentencePiece falls back to; None for
    other pieces.

    >>> bytes_of_piece("Ġé"), bytes_of_piece("<0xC3>"), bytes_of_piece("▁a")
    (b' \\xe9', b'\\xc3', None)
    """
    match = _BYTE.fullmatch(piece)
    if match:
        return bytes.fromhex(match[1])
    if not all(letter in _BYTE_OF_LETTER for letter in piece):
        return None
    return bytes(_BYTE_OF_LETTER[letter] for letter in piece)


def _bytes_by_letter() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2): printable ones stand for themselves,
    the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    letters |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return letters


_BYTE_OF_LETTER = _bytes_by_letter()
