"""Rows from files and objects of every form, and what is said where they can't be read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from messages import says

from turnwise.data.tables import ParameterColumns, TableRow, arguments_of, read_tables
from turnwise.errors import DataError

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]


def columns(rows: list[TableRow]) -> list[dict[str, object]]:
    return [dict(row.columns) for row in rows]


def test_every_form_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    module = ModuleType("rows_in_python")
    module.rows, module.dataset = ROWS, datasets.Dataset.from_list(ROWS)
    monkeypatch.setitem(sys.modules, "rows_in_python", module)
    names = [*(str(tmp_path / name) for name in ("rows.jsonl", "rows.parquet", "saved"))]
    for name in [*names, "rows_in_python:rows", "rows_in_python:dataset"]:
        assert columns(read_tables([name], "data.train_files")) == ROWS
    both = read_tables(names[:2], "data.train_files")
    assert [row.place.rpartition("/")[2] for row in both] == [
        "rows.jsonl, line 1",
        "rows.jsonl, line 2",
        "rows.parquet, row 1",
        "rows.parquet, row 2",
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", b"", says("empty.jsonl", "no rows")),
        ("missing.jsonl", None, says("missing.jsonl", "no such file")),
        ("missing.parquet", None, says("missing.parquet", "no such file")),
        ("broken.parquet", b"nothing of the kind", says("broken.parquet", "Parquet")),
        ("list.jsonl", b"[1]\n", says("list.jsonl", "line 1", "[1]")),
        ("rows.csv", b"a,b\n", says("rows.csv", "no rows")),
        (
            "rows.xls",
            b"a,b\n",
            says("rows.xls", ".jsonl, .json, .csv"),
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_tables([str(tmp_path / name)], "data.train_files")
    assert re.search(said, str(caught.value))


def test_a_long_load_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines come some seconds apart; here after each row."""
    monkeypatch.setattr("turnwise.data.tables._SECONDS_BETWEEN_LINES", -1.0)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n' * 3)
    read_tables([str(file)], "data.train_files")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"reading {file}: {number} rows so far" for number in (1, 2, 3)
    ]


def test_a_folder_that_holds_several_splits_names_them(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=says("splits", "saved/train")):
        read_tables([str(tmp_path / "saved")], "data.train_files")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=says("datasets", "folder")):
        read_tables([str(tmp_path / "folder")], "data.train_files")


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str, split: str) -> list[dict[str, str]]:
        asked.append((*names, split))
        if split == "train":
            return ROWS
        raise ConnectionError(f"Couldn't reach '{names[0]}' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=says("gsm8k", "split test", "hf download")):
        read_tables(["openai/gsm8k:main:test"], "data.val_files")
    assert columns(read_tables(["openai/gsm8k"], "data.train_files")) == ROWS
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "train")]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RuntimeError("Dataset scripts are no longer supported"), "Dataset scripts are no longer supported"),
        (datasets.exceptions.DatasetGenerationError("half"), "half"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_any_fault_of_the_hub_is_said(monkeypatch: pytest.MonkeyPatch, fault: Exception, said: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=says("split train") + f".*{said}"):
        read_tables(["owner/name"], "data.train_files")


def test_a_column_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "x", "picture": b"\x00\x01"}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=says("row 1", "'picture'", "bytes")):
        read_tables([str(tmp_path / "rows.parquet")], "data.train_files")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (iter(ROWS), says("list_iterator", "mappings")),
        ([{("a", 1): "x"}], says("row 1", "('a', 1)", "tuple")),
        (
            [{"prompt": "x", "extra": {1: "x", "a": "y"}}],
            says("row 1", "'extra'", "dict"),
        ),
        (
            [{"prompt": [{"content": "\ud800"}]}],
            says("row 1", "'prompt'", r"'\ud800'"),
        ),
        ([{"\udfff": "x"}], says("row 1", r"column '\udfff'")),
    ],
)
def test_rows_that_json_cannot_hold_or_that_can_be_read_only_once_are_refused(
    monkeypatch, rows, message
) -> None:
    module = ModuleType("own_rows")
    module.ROWS = rows
    monkeypatch.setitem(sys.modules, "own_rows", module)
    with pytest.raises(DataError, match=message):
        read_tables(["own_rows:ROWS"], "data.train_files")


def test_columns_arrive_under_their_names_and_those_of_their_leaves() -> None:
    row = {"prompt": "?", "reward_model": {"ground_truth": "4", "style": {"kind": "rule"}}}
    found = arguments_of(row)
    assert (
        found["ground_truth"] == "4"
        and found["kind"] == "rule"
        and found["reward_model"] == row["reward_model"]
    )


def function(completions: list[str], answer: list[str], level: list[int] | None = None) -> list[float]:
    return []


def everything(completions: list[str], **columns: list[object]) -> list[float]:
    return []


def test_a_missing_column_is_named_with_its_row() -> None:
    wanted = ParameterColumns.by(function, ["completions"])
    wanted.check([TableRow("rows.jsonl, line 1", {"answer": "4"})], "data.reward function")
    with pytest.raises(DataError, match=says("line 2", "data.reward function", "'answers'")):
        wanted.check([TableRow("rows.jsonl, line 2", {"answers": "4"})], "data.reward function")


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_row_without_a_column_is_refused_from_every_form_of_file(tmp_path: Path, is_nested: bool) -> None:
    parts = [{"answer": "4", "level": 1}, {"level": None, "style": "rule"}]
    rows = [{"prompt": "?", **({"reward_model": part} if is_nested else part)} for part in parts]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    wanted = ParameterColumns.by(function, ["completions"])
    for name in ("rows.jsonl", "rows.parquet"):
        first, second = read_tables([str(tmp_path / name)], "data.train_files")
        wanted.check([first], "data.reward function")
        with pytest.raises(DataError, match=says("data.reward function", "'answer'", "null")):
            wanted.check([second], "data.reward function")
        assert wanted.choose(first.columns) == {"answer": "4", "level": 1}
        assert "level" not in wanted.choose(second.columns), (
            "null would take the place of the parameter's default"
        )


def test_a_clash_of_names_is_an_error_for_whom_it_reaches() -> None:
    row = TableRow("line 1", {"answer": "4", "extra": {"level": 1}, "info": {"level": 2}})
    with pytest.raises(DataError, match=says("'level'", "extra.level", "info.level")):
        ParameterColumns.by(function, ["completions"]).check([row], "data.reward function")
    wanted = ParameterColumns.by(everything, ["completions"])
    wanted.check([row], "data.reward everything")
    assert "level" not in wanted.choose(row.columns) and wanted.choose(row.columns)["answer"] == "4"
    ParameterColumns.by(lambda completions, answer: [], ["completions"]).check([row], "data.reward brief")
