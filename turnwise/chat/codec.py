"""Text ↔ token ids. The Rust tokenizers are called directly, since transformers' code around them takes
longer than they do."""

from __future__ import annotations

import os
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

    def encode(self, text: str, context: str = "") -> list[int]:
        """The ids of a text that follows the text `context`. Some tokenizers put a space before a text if it
        follows nothing."""
        if context and self._begins_texts:
            context_ids = self._ids(context)
            whole = self._ids(context + text)
            num_context = len(context_ids)
            if whole[:num_context] == context_ids:
                return whole[num_context:]
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
        tokenizer = self._tokenizer
        tokens = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        tokens.update(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        return {index: token for index, token in tokens.items() if token.strip()}

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the vocabulary's longest entry."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _begins_texts(self) -> bool:
        """Whether a text has other ids at the start than after another text (legacy SentencePiece adds a
        leading space)."""
        separate = self._ids("\n") + self._ids("x")
        return self._ids("\nx") != separate

    def _ids(self, text: str) -> list[int]:
        backend = self._backend
        # A call of transformers' tokenizer with one of these options leaves the option set in the Rust
        # tokenizer.
        if backend is None or backend.truncation or backend.padding or backend.encode_special_tokens:
            return _encode(self._tokenizer, text)
        return _backend_ids(backend, text)


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer; None if there is none, or if the class around it changes texts or ids."""
    if not tokenizer.is_fast:
        return None
    backend: Tokenizer = tokenizer.backend_tokenizer
    text = _PROBE + "".join(tokenizer.all_special_tokens)
    token_ids = _encode(tokenizer, text)
    if _backend_ids(backend, text) != token_ids:
        return None
    if backend.decode(token_ids) != _decode(tokenizer, token_ids):
        return None
    return backend


def _backend_ids(backend: Tokenizer, text: str) -> list[int]:
    """The ids of a text. `encode` takes 20 to 50% more time, for the places of tokens in the text; but
    `encode_batch_fast` may start threads, which don't survive a fork, and is only used without them."""
    if os.environ.setdefault("TOKENIZERS_PARALLELISM", "false") == "false":
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    else:
        encoding = backend.encode(text, add_special_tokens=False)
    token_ids: list[int] = encoding.ids
    return token_ids


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _decode(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    skips_special: bool = True,
) -> str:
    text = tokenizer.decode(
        token_ids,
        skip_special_tokens=skips_special,
        clean_up_tokenization_spaces=False,
    )
    return str(text)
