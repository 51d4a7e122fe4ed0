"""Names the tokens of a model folder for readers, without transformers, which takes seconds to import."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from turnwise.errors import ModelError
from turnwise.model_files.token_pieces import bytes_of_piece

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
        return bytes_of_piece(piece)
