"""Texts and ids past transformers' own bookkeeping, and what is kept of them."""

from __future__ import annotations

import os

import pytest
from chat_messages import user

from turnwise.chat.codec import TextCodec
from turnwise.chat.template import ChatTemplate
from turnwise.testing.fakes import byte_tokenizer

TEXT = "Go <|im_end|> é  now\n"


def test_ids_are_the_tokenizer_s_own_whatever_another_call_has_left_switched_on():
    tokenizer = byte_tokenizer(training_texts=["Go now, go now, go"], vocab_size=270)
    codec = TextCodec(tokenizer)
    expected = tokenizer.encode(TEXT, add_special_tokens=False)
    assert codec.encode(TEXT) == expected
    tokenizer("a b c", truncation=True, max_length=2)
    assert codec.encode(TEXT) == expected
    assert codec.decode(expected) == tokenizer.decode(expected, skip_special_tokens=True)


class Batches:
    """A Rust tokenizer that counts the calls that may start threads."""

    def __init__(self, backend):
        self._backend = backend
        self.num_calls = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode_batch_fast(self, *args, **options):
        self.num_calls += 1
        return self._backend.encode_batch_fast(*args, **options)


@pytest.mark.parametrize(("parallelism", "is_batched"), [(None, True), ("false", True), ("true", False)])
def test_a_text_is_encoded_as_a_batch_where_that_starts_no_threads(monkeypatch, parallelism, is_batched):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if parallelism is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
    tokenizer = byte_tokenizer()
    codec = TextCodec(tokenizer)
    codec._backend = Batches(codec._backend)
    assert codec.encode(TEXT) == tokenizer.encode(TEXT, add_special_tokens=False)
    assert codec._backend.num_calls == is_batched
    assert os.environ["TOKENIZERS_PARALLELISM"] == (parallelism or "false")


def test_a_tokenizer_that_does_something_of_its_own_is_asked_itself():
    tokenizer = byte_tokenizer()
    plain = type(tokenizer)

    class Own(plain):
        def encode(self, text, **kwargs):
            return super().encode(text.lower(), **kwargs)

    tokenizer.__class__ = Own
    assert TextCodec(tokenizer).encode("UP") == [ord("u") - 33, ord("p") - 33]


def test_messages_that_were_met_before_are_not_rendered_again_and_new_ones_are():
    template = ChatTemplate(byte_tokenizer())
    messages, other = [user("Where to?")], [user("And now?")]
    first = template.start(messages)
    first_again = template.start(messages)
    assert first == first_again and first is not first_again
    first_again.append(1)
    assert template.start(messages) == first != template.start(other)
    assert template.extend([], messages) != template.start(messages)
