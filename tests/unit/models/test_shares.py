"""Shares of tensors: written in files of a bounded size, read in any parts, refused where they don't fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from toy_model import toy_model

from turnwise.errors import ModelError
from turnwise.model_files.share_index import INDEX_FILE, SHARES, Place, fault_of_tiling, read_index
from turnwise.models.consolidate import write_plain_weights
from turnwise.models.export import export_model
from turnwise.models.load import load_model, load_tokenizer
from turnwise.models.make import make_model
from turnwise.models.shares import Shares, moment_key
from turnwise.runtime.rank import RankContext
from turnwise.training.fsdp2_strategy import Fsdp2Strategy
from turnwise.training.model_source import ModelSource
from turnwise.training.ranks import Ranks
from turnwise.training.settings import FROZEN
from turnwise.training.share_writer import Block, file_contents, require_space_for_all, write_shares

MAX_BYTES = 12_000
TENSORS = {
    "wide": torch.arange(5000.0).view(500, 10),
    "norm": torch.randn(7),
    "number": torch.tensor(2.5),
    moment_key("exp_avg", "norm"): torch.randn(7),
}


def block(name: str, values: torch.Tensor) -> Block:
    return Block(name, tuple(values.shape), (0,) * values.ndim, values)


@pytest.fixture(autouse=True)
def leave_groups() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blocks = [block(name, values) for name, values in TENSORS.items()]
    write_shares(tmp_path / "saved", blocks, Ranks(), MAX_BYTES)
    return tmp_path / "saved"


def files(folder: Path) -> list[Path]:
    return sorted((folder / SHARES).rglob("*.safetensors"))


def test_tensors_come_back_whole_and_by_rows(folder: Path) -> None:
    shares = Shares(folder)
    for name, values in TENSORS.items():
        assert torch.equal(shares.whole(name, values.shape), values)
    assert torch.equal(shares.rows("wide", (500, 10), 123, 400), TENSORS["wide"][123:400])
    assert shares.rows("wide", (500, 10), 500, 500).shape == (0, 10)
    assert (
        shares.part("wide", (500, 10), Place((2, 3), (4, 5))).tolist() == TENSORS["wide"][2:6, 3:8].tolist()
    )
    assert shares.weights == ["norm", "number", "wide"]


def test_files_are_as_large_as_allowed_and_the_index_says_what_they_hold(folder: Path) -> None:
    sizes = [file.stat().st_size for file in files(folder)]
    assert len(sizes) == 3 and max(sizes) <= MAX_BYTES
    index = read_index(folder)
    assert [contents.num_bytes for contents in index.files.values()] == sizes


def test_a_row_is_not_cut_and_a_file_holds_one_block_of_a_tensor() -> None:
    contents = list(file_contents([block("a", torch.zeros(3, 4000)), block("b", torch.zeros(2))], MAX_BYTES))
    assert [[piece.name for piece in of_file] for of_file in contents] == [["a"], ["a"], ["a"], ["b"]]
    assert [of_file[0].offsets for of_file in contents[:3]] == [(0, 0), (1, 0), (2, 0)]


def test_a_block_of_another_copy_fills_the_file_and_is_not_written(tmp_path: Path) -> None:
    blocks = [block("a", torch.ones(3)), Block("b", (3,), (0,), torch.ones(3), is_written=False)]
    write_shares(tmp_path, blocks, Ranks(), MAX_BYTES)
    assert list(read_index(tmp_path).shapes) == ["a"]


@pytest.mark.parametrize("max_bytes", [10**9, 15_000])
def test_plain_weights_are_the_tensors(folder: Path, max_bytes: int) -> None:
    """Two processes deal the files out; moments stay outside."""
    for number in range(2):
        write_plain_weights(Shares(folder), folder, number, 2, max_bytes)
    loaded: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        loaded |= load_file(file)
    assert loaded.keys() == {"wide", "norm", "number"}
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in loaded)


Damage = Callable[[Path], object]


def lose_a_file(folder: Path) -> None:
    files(folder)[0].unlink()


def add_a_file(folder: Path) -> None:
    shutil.copy(files(folder)[0], folder / SHARES / "00001" / "shard-00009.safetensors")


def cut_a_file(folder: Path) -> None:
    file = files(folder)[0]
    file.write_bytes(file.read_bytes()[:-8])


def exchange_a_tensor(folder: Path) -> None:
    """As long as the share was, with another name."""
    file = files(folder)[0]
    file.write_bytes(file.read_bytes().replace(b'"wide"', b'"wids"'))


def change_a_shape(folder: Path) -> None:
    """As many bytes, in other rows."""
    file = files(folder)[0]
    rows = load_file(file)["wide"].shape[0]
    file.write_bytes(file.read_bytes().replace(f"[{rows},10]".encode(), f"[10,{rows}]".encode()))


def in_index(change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / SHARES / INDEX_FILE
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))

    return damage


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lose_a_file, "is missing"),
        (add_a_file, "doesn't name"),
        (cut_a_file, "bytes"),
        (exchange_a_tensor, "other tensors"),
        (change_a_shape, "has shape"),
        (in_index(lambda values: values["shapes"].update(wide=[501, 10])), "hold 5000 of its 5010"),
        (in_index(lambda values: values["shapes"].update(wide=[400, 10])), "outside"),
        (in_index(lambda values: values.update(format=2)), "format"),
        (
            in_index(
                lambda values: values["files"].update({"../x": {"bytes": 1, "sha256": "", "blocks": {}}})
            ),
            "x",
        ),
        (lambda folder: (folder / SHARES / INDEX_FILE).write_text("[]"), INDEX_FILE),
        (lambda folder: (folder / SHARES / INDEX_FILE).unlink(), INDEX_FILE),
    ],
)
def test_refuses_shares_that_do_not_fit(folder: Path, damage: Damage, key: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=key):
        Shares(folder)


def test_refuses_a_model_with_other_tensors(folder: Path) -> None:
    shares = Shares(folder)
    with pytest.raises(ModelError, match="no tensor missing"):
        shares.whole("missing", (2,))
    with pytest.raises(ModelError, match=r"500 × 10 .* 10 × 500"):
        shares.rows("wide", (10, 500), 0, 1)


def test_overlapping_columns_are_found() -> None:
    assert fault_of_tiling((2, 4), [Place((0, 0), (2, 2)), Place((0, 2), (2, 2))]) == ""
    assert "overlap" in fault_of_tiling((2, 4), [Place((0, 0), (2, 3)), Place((1, 2), (1, 2))])


def test_refuses_a_disk_without_space(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="takes about") as refused:
        require_space_for_all(tmp_path / "new", 10**18, Ranks())
    assert refused.value.errno == 28


def test_a_disk_that_fails_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / SHARES).write_text("a file")
    with pytest.raises(OSError, match=SHARES):
        write_shares(tmp_path, [block("a", torch.ones(3))], Ranks())


def test_export_puts_shares_together_and_loading_asks_for_it(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "model", ["0 1 2 3"])
    strategy = Fsdp2Strategy.for_role(ModelSource(str(tmp_path / "model")), RankContext(), {}, FROZEN)
    strategy.save(tmp_path / "checkpoint")
    load_tokenizer(tmp_path / "model").save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ModelError, match="turnwise export"):
        load_model(tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "plain", torch.bfloat16)
    expected = load_model(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    exported = load_model(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_other_models_are_not_set(tmp_path: Path) -> None:
    strategy = Fsdp2Strategy(toy_model(), FROZEN, options={})
    strategy.save(tmp_path)
    other = Fsdp2Strategy(toy_model(num_hidden_layers=1), FROZEN, options={})
    with pytest.raises(ModelError, match="doesn't have"):
        other.load(tmp_path)
