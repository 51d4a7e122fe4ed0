from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from messages import mentions
from safetensors import safe_open

from turnwise.cli.main import main
from turnwise.errors import ModelError
from turnwise.models.load import load_model, load_tokenizer
from turnwise.models.make import make_model
from turnwise.play.tokenizer_text import environment_text

GRID = "P _ _ O\n_ √ X G\nO _ _ _\n"
CORPUS = [
    f"You walk on a frozen lake.\n{GRID}<think>the goal is right</think><answer>Right</answer>\n",
    "<|im_start|>user\nYou are at row 1, column 3.<|im_end|>\n",
] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", out, CORPUS, seed=3, vocab_size=400)
    return out


def test_the_folder_loads_and_has_about_a_million_parameters(folder: Path) -> None:
    model = load_model(folder)
    assert 0.7e6 < model.num_parameters() < 1.3e6
    assert model.config.model_type == "qwen3" and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == load_tokenizer(folder).convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )


@pytest.mark.parametrize("symbol", list("_OPXG√") + list("129"))
def test_grid_symbols_are_one_token_with_and_without_their_space(folder: Path, symbol: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode(symbol)) == len(tokenizer.encode(" " + symbol)) == 1


def test_tokens_never_span_symbols_digits_or_lines(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("P_OO 123,\n\n√√")]
    assert pieces == ["P", "_", "O", "O", " 1", "2", "3", ",", "\n", "\n", "√", "√"]


def test_text_survives_and_markers_are_ordinary_single_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "<think>Größe 冰</think> <answer>Right</answer>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    for marker in ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(marker)) == 1
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>"), skip_special_tokens=True) == "a"


def test_the_template_is_append_only_chatml(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    start = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert start == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    longer = [*messages, {"role": "assistant", "content": "<think>x</think>a"}]
    assert tokenizer.apply_chat_template(longer, tokenize=False) == start + "<think>x</think>a<|im_end|>\n"
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())


def test_equal_arguments_give_equal_bytes_and_another_seed_other_weights(
    folder: Path, tmp_path: Path
) -> None:
    make_model("tiny", tmp_path / "again", CORPUS, seed=3, vocab_size=400)
    make_model("tiny", tmp_path / "other", CORPUS, seed=4, vocab_size=400)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (
        folder / "model.safetensors"
    ).read_bytes()


@pytest.mark.usefixtures("quick")
def test_overrides_reach_the_config_and_are_checked(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    summary = make_model("tiny", tmp_path / "m", CORPUS, vocab_size=300, overrides=overrides)
    assert summary.num_tokens <= summary.vocab_size <= 300
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [summary.vocab_size, 32]
    with pytest.raises(ModelError, match="num_hidden_layers"):
        make_model("tiny", tmp_path / "x", CORPUS, overrides={"num_hidden_layer": 1})
    with pytest.raises(ModelError, match="multiple of num_key_value_heads"):
        make_model("tiny", tmp_path / "x", CORPUS, overrides={"num_key_value_heads": 3})
    with pytest.raises(ModelError, match="has 263 to"):
        make_model("tiny", tmp_path / "x", CORPUS, vocab_size=100)
    with pytest.raises(ModelError, match="Did you mean 'tiny'"):
        make_model("tinny", tmp_path / "x", CORPUS)
    assert not (tmp_path / "x").exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains tokenizers on each symbol once instead of 5,000 times, and on no games, which takes a second."""
    monkeypatch.setattr("turnwise.models.tokenizer._SYMBOL_COUNT", 1)
    monkeypatch.setattr("turnwise.cli.model_commands.environment_text", list)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("size", "changes"), [("qwen2.5-0.5b", {}), ("tiny", {"vocab_size": 700})])
def test_every_id_that_can_be_sampled_has_a_text(size: str, changes: dict[str, int], tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 1, "hidden_size": 28, "intermediate_size": 32, **changes}
    summary = make_model(size, tmp_path / "m", CORPUS, overrides=overrides)
    tokenizer = load_tokenizer(tmp_path / "m")
    ids = sorted(tokenizer.get_vocab().values())
    assert ids == list(range(summary.vocab_size)) and summary.vocab_size == changes.get("vocab_size", 151_936)
    assert all(tokenizer.batch_decode([[number] for number in ids[-300:]]))
    small = make_model(
        "tiny", tmp_path / "small", CORPUS, vocab_size=400, overrides=overrides | {"vocab_size": 400}
    )
    text = "the ab goal is <answer>Right</answer> ab"
    own, plain = tokenizer.encode(text), load_tokenizer(small.folder).encode(text)
    assert tokenizer.decode(own) == text and len(own) <= len(plain), "what fills up is never encoded"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "hidden_size=-4"], "hidden_size is -4; it must be a whole number of at least 1"),
        (
            ["--set", "num_attention_heads=0"],
            "num_attention_heads is 0; it must be a whole number of at least 1",
        ),
        (["--set", "vocab_size=abc"], "vocab_size is 'abc'; it must be a whole number of at least 1"),
        (
            ["--set", "num_hidden_layers=9999999"],
            "num_hidden_layers is 9999999; it must be a whole number from 1 to 10,000",
        ),
        (["--set", "attention_dropout=3"], "attention_dropout is 3; it must be a number from 0 to 1"),
        (["--set", "attention_dropout=nan"], "attention_dropout is 'nan'; it must be a number from 0 to 1"),
        (["--set", "sliding_window=-1"], "sliding_window is -1; it must be a whole number of at least 1"),
        (
            ["--set", "max_window_layers=-1"],
            "max_window_layers is -1; it must be a whole number of at least 0",
        ),
        (["--set", "rms_norm_eps=-1.0"], "rms_norm_eps is -1.0; it must be a number from 0 to 1"),
        (["--set", "initializer_range=NaN"], "initializer_range is nan; it must be a number from 0 to 1,000"),
        (
            ["--set", 'rope_parameters={"rope_type": "default", "rope_theta": 0}'],
            "rope_parameters: rope_theta is 0; it must be a number above 0",
        ),
        (["--set", "output_attentions=true"], "--set output_attentions would have no effect"),
        (["--set", "rope_parameters=3"], "Field 'rope_parameters'"),
        (
            ["--set", "vocab_size=99999999999"],
            "vocab_size is 99999999999; a byte-level tokenizer has 263 to 1,000,000 tokens",
        ),
        (["--set", "hidden_act=nope"], "makes no model: 'nope' is unknown"),
        (["--set", "dtype=float16"], "--set dtype would have no effect"),
        (["--set", "architectures=[Other]"], "--set architectures would have no effect"),
        (["--text", sys.executable], "line 1 isn't UTF-8 (byte 0x"),
    ],
)
def test_the_command_line_is_answered_in_one_sentence(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("A word.")
    assert main(["make-model", "--out", str(tmp_path / "m"), "--text", str(tmp_path / "text"), *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1 and not (tmp_path / "m").exists()


def test_an_empty_text_teaches_nothing(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "m", ["", "A word.", "\n"])
    assert load_tokenizer(tmp_path / "m")("A word.").input_ids


CODES = [f"Remember {''.join(random.Random(seed).choices('abcdefghkmnpqr', k=7))}." for seed in range(1500)]


def test_characters_of_words_that_are_split_in_many_ways_are_counted(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32}
    merged = make_model("tiny", tmp_path / "merged", CODES, overrides=sizes)
    assert merged.scattered.keys() == set("abcdefghkmnpqr") and min(merged.scattered.values()) > 20
    plain = make_model("tiny", tmp_path / "plain", CODES, overrides=sizes, has_merges=False)
    assert plain.scattered == {} and plain.num_tokens == 263
    tokenizer = load_tokenizer(tmp_path / "plain")
    ids = tokenizer("kap", add_special_tokens=False).input_ids
    assert len(ids) == 3 and tokenizer.decode(ids) == "kap"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "<answer>"}], tokenize=False)


def test_words_that_are_whole_are_no_reason_to_warn(tmp_path: Path) -> None:
    made = make_model("tiny", tmp_path / "m", environment_text(), overrides={"num_hidden_layers": 1})
    assert made.scattered == {}


@pytest.mark.extra
def test_the_command_warns_and_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "codes").write_text("\n".join(CODES))
    words = ["make-model", "--text", str(tmp_path / "codes"), "--set", "num_hidden_layers=1", "--out"]
    assert main([*words, str(tmp_path / "a")]) == 0
    assert mentions(capsys.readouterr().err, "warning", "copy", "--no-merges")
    assert main([*words, str(tmp_path / "b"), "--no-merges"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["make-model", "--from", "x.gguf", "--no-merges", "--out", str(tmp_path / "c")]) == 2
    assert mentions(capsys.readouterr().err, "--no-merges", "no effect")
