"""The text of single tokens, without transformers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from turnwise.errors import ModelError
from turnwise.models.token_decoder import TokenDecoder, has_tokens
from turnwise.report.view.token_texts import TokenTexts
from turnwise.testing.fakes import byte_tokenizer


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer(training_texts=["the goal, the goal"], vocab_size=300).save_pretrained(tmp_path)
    return tmp_path


def test_tokens_of_bytes_keep_blanks_and_special_tokens(folder):
    tokenizer = byte_tokenizer(training_texts=["the goal, the goal"], vocab_size=300)
    texts = TokenTexts(TokenDecoder(folder))
    ids = tokenizer(" the goal\n海<|im_end|>")["input_ids"]
    assert "".join(texts.text(token_id) for token_id in ids[:-4]) == " the goal\n"
    assert [texts.text(token_id) for token_id in ids[-4:]] == ["⟨e6⟩", "⟨b5⟩", "⟨b7⟩", "<|im_end|>"]
    assert ids[-1] in texts.decoder.special_ids and ids[0] not in texts.decoder.special_ids
    assert texts.decoder.decode(ids) == " the goal\n海<|im_end|>"
    assert texts.text(100_000) == ""


def test_tokens_of_sentencepiece_keep_the_blank_in_front(tmp_path):
    vocab = {"<unk>": 0, "\u2581the": 1, "<0xE6>": 2, "goal": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(TokenDecoder(tmp_path))
    assert [texts.text(token_id) for token_id in (1, 2, 3)] == [" the", "⟨e6⟩", "goal"]


def test_a_folder_without_a_readable_tokenizer_is_one_sentence(tmp_path):
    assert not has_tokens(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TokenDecoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="can't be read"):
        TokenDecoder(tmp_path)
