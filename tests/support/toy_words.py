"""The tokenizer and chat template of the worked examples in the design of the conversation tree: a token is a
word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.chat.template import ChatTemplate

WORDS = {
    "<unk>": 0,
    "<s>": 1,
    "<u>": 2,
    "<a>": 3,
    "<t>": 4,
    "<e>": 5,
    "sys": 10,
    "go": 11,
    "left": 12,
    "right": 13,
    "again": 14,
    "sub": 15,
    "do": 16,
    "done": 17,
    "sum": 18,
    "s1": 19,
    "red": 20,
    "blue": 21,
    "ok": 22,
    "call": 23,
}
END = WORDS["<e>"]
_SOURCE = (
    "{% set marks = {'system': '<s>', 'user': '<u>', 'assistant': '<a>', 'tool': '<t>'} %}"
    "{% for m in messages %}{{ marks[m.role] + ' ' + m.content + ' <e>' }}{% if not loop.last %}{{ ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' <a>' }}{% endif %}"
)


def word_template(extra_words: Iterable[str] = ()) -> ChatTemplate:
    """The template `<s> text <e>`, `<u> text <e>`, `<a> text <e>`, `<t> text <e>`, with the header `<a>`."""
    known = WORDS | {f"pad{number}": number for number in range(6, 10)}
    vocab = known | {word: len(known) + number for number, word in enumerate(extra_words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    marks = [word for word in vocab if word.startswith("<") and word != "<unk>"]
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    return ChatTemplate(tokenizer, _SOURCE)


def ids_of(words: str) -> list[int]:
    return [WORDS[word] for word in words.split()]


def text_of(ids: Sequence[int]) -> str:
    words = {number: word for word, number in WORDS.items()}
    return " ".join(words[number] for number in ids)
