"""Text ↔ token ids. The Rust tokenizers are called directly, since transformers' code around them takes
longer than they do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PROBE = "One  two\n\tthree é✓ "


class TextCodec:
    """Encodes and decodes exactly like the tokenizer itself, without adding special tokens.

    >>> from turnwise.testing.fakes import byte_tokenizer
    >>> codec = TextCodec(byte_tokenizer())
    >>> codec.decode(codec.encode("Up<|im_end|>"))
    'Up'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)

    def encode(self, text: str, after: str = "") -> list[int]:
        """The ids of a text that follows the text `after`. Some tokenizers put a space before a text if it
        follows nothing."""
        if after and self._begins_texts:
            before, whole = self._ids(after), self._ids(after + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._ids(text)

    def decode(self, token_ids: Sequence[int], skips_special: bool = True) -> str:
        """The text of the ids, by default without special tokens. Encoding this text may yield other ids."""
        if self._backend is None:
            return _decode(self._tokenizer, token_ids, skips_special)
        return str(self._backend.decode(token_ids, skip_special_tokens=skips_special))

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Id → token, for all tokens that the tokenizer never splits, special or not; tokens of white space
        are left out."""
        added = {index: token.content for index, token in self._tokenizer.added_tokens_decoder.items()}
        special = dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))
        return {index: token for index, token in (added | special).items() if token.strip()}

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the vocabulary's longest entry."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _begins_texts(self) -> bool:
        """Whether a text has other ids at the start than after another text (legacy SentencePiece adds a
        leading space)."""
        return self._ids("\nx") != [*self._ids("\n"), *self._ids("x")]

    def _ids(self, text: str) -> list[int]:
        backend = self._backend
        # A call of transformers' tokenizer with one of these options leaves the option set in the Rust
        # tokenizer.
        if backend is None or backend.truncation or backend.padding or backend.encode_special_tokens:
            return _encode(self._tokenizer, text)
        token_ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return token_ids


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer; None if there is none, or if the class around it changes texts or ids."""
    if not tokenizer.is_fast:
        return None
    backend: Tokenizer = tokenizer.backend_tokenizer
    text = _PROBE + "".join(tokenizer.all_special_tokens)
    token_ids = _encode(tokenizer, text)
    is_plain = backend.encode(text, add_special_tokens=False).ids == token_ids
    return backend if is_plain and backend.decode(token_ids) == _decode(tokenizer, token_ids) else None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skips_special: bool = True) -> str:
    return str(
        tokenizer.decode(token_ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)
    )
