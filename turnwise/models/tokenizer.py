"""A byte-level BPE tokenizer for small models, trained on a corpus like the text that they will see."""

import json
from collections.abc import Iterable, Sequence
from itertools import count, islice, product
from pathlib import Path
from string import ascii_letters, ascii_lowercase, digits

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnwise.errors import ModelError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
"""Each is one token, but not a special token, so that it stays in decoded responses."""

CHAT_TEMPLATE = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
"""ChatML, with tool calls as JSON in `<tool_call>` (as in Hermes 2 Pro) and results as messages of the role
`tool`."""

_WORDS = Regex(
    r" ?[^\s\p{N}]\p{N}+,\p{N}+| ?\p{Lu}?\p{Ll}+| ?\p{L}| ?\p{N}| ?[^\s\p{L}\p{N}]|\n|[^\S\n]+(?!\S)|[^\S\n]+"
)
"""Pieces of a text, within which BPE merges: a symbol with its coordinates (`O1,2`); a word; a single digit,
symbol, or capital that starts no word; each with the space before it. So each cell of a grid is one token,
and a frequent symbol with coordinates is one, too. White space elsewhere is a piece of its own."""

_MOST_TOKENS = 1_000_000
"""Maximum of `vocab_size`, more than any published model has. The BPE trainer needs memory in proportion to
`vocab_size`, and the process dies if the memory doesn't suffice."""
MAX_TOKENS_OF_A_CHARACTER = 20
_LETTERS_AND_DIGITS = frozenset(ascii_letters + digits)
_NUM_READ = 5_000
_SYMBOL_COUNT = 5_000
"""How often the trainer sees each symbol in addition to the corpus: so often that a symbol of several bytes
becomes one token even if it is rare (such as the sign of a goal, once per episode)."""


def train_tokenizer(
    corpus: Iterable[str],
    vocab_size: int,
    is_filled: bool = False,
    has_merges: bool = True,
) -> PreTrainedTokenizerFast:
    """A tokenizer with at most `vocab_size` tokens and a ChatML template that shows tools. Equal corpora give
    equal tokenizers. With `is_filled` it has exactly `vocab_size` tokens: if the corpus gives fewer, the rest
    are strings of letters that encoding never produces. Without `has_merges`, each byte is a token, so that
    letters and digits can be copied wherever they stand. Raises ModelError if `vocab_size` is too small for
    bytes, special tokens and markers, or over a million."""
    texts = list(corpus)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_fixed = len(alphabet) + len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    if not num_fixed <= vocab_size <= _MOST_TOKENS:
        raise ModelError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer has {num_fixed} to {_MOST_TOKENS:,} tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    num_trained = vocab_size - len(MARKER_TOKENS)
    if not has_merges:
        num_trained = len(alphabet) + len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=num_trained,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    roles = (f"{role}\n" * _SYMBOL_COUNT for role in ("system", "user", "assistant"))
    tokenizer.train_from_iterator(_without_markers([*texts, *_repeated_symbols(texts), *roles]), trainer)
    if is_filled:
        _fill(tokenizer, vocab_size - len(MARKER_TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKER_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def scattered_characters(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> dict[str, int]:
    """Digits and letters (ASCII) that a small model can hardly copy, with the number of tokens in which each
    stands: more than `MAX_TOKENS_OF_A_CHARACTER`, in those words of the texts that are several tokens. Words
    that are one token each are left out, since they are copied whole. Reads the first `_NUM_READ` texts."""
    backend = tokenizer.backend_tokenizer
    words = {
        word for text in islice(texts, _NUM_READ) for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)
    }
    tokens: dict[str, set[str]] = {}
    for word in words:
        parts = [token.value for token in backend.model.tokenize(word)]
        if len(parts) == 1:
            continue
        for part in parts:
            for char in set(part) & _LETTERS_AND_DIGITS:
                tokens.setdefault(char, set()).add(part)
    return {
        char: len(parts) for char, parts in sorted(tokens.items()) if len(parts) > MAX_TOKENS_OF_A_CHARACTER
    }


def _fill(tokenizer: Tokenizer, num_tokens: int) -> None:
    """Adds tokens without merges until there are `num_tokens`. They can be sampled and decoded; encoding
    never yields them."""
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    words = ("".join(letters) for length in count(2) for letters in product(ascii_lowercase, repeat=length))
    new = islice((word for word in words if word not in model["vocab"]), num_tokens - len(vocab))
    vocab = vocab | {word: len(vocab) + index for index, word in enumerate(new)}
    tokenizer.model = models.BPE(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]])


def _without_markers(texts: Sequence[str]) -> Iterable[str]:
    """The texts without markers and special tokens. Encoding matches these before BPE, so BPE mustn't learn
    their letters."""
    for text in texts:
        for token in (*SPECIAL_TOKENS, *MARKER_TOKENS):
            text = text.replace(token, "\n")
        yield text


def _repeated_symbols(texts: Sequence[str]) -> Iterable[str]:
    """Texts that repeat one character each, with and without a space: the digits, and symbols and lone
    capitals of `texts`."""
    symbols = set("0123456789") | {
        char
        for text in texts
        for char, following in zip(text, (text + " ")[1:], strict=True)
        if not char.isspace() and (not char.isalpha() or (char.isupper() and not following.islower()))
    }
    return (f"{symbol}{symbol} " * _SYMBOL_COUNT for symbol in sorted(symbols))
