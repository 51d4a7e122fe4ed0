"""Reading JSONL demonstrations, and what is said of rows that aren't any."""

from __future__ import annotations

import json

import pytest

from turnwise.data.demonstrations import read_demonstrations
from turnwise.errors import DataError

ROW = {"messages": [{"role": "user", "content": "√?"}, {"role": "assistant", "content": "yes"}]}


def test_rows_of_all_files_in_order(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    second.write_text(json.dumps({"messages": ROW["messages"][:1]}) + "\n")
    assert [len(m) for m in read_demonstrations([first, second])] == [2, 2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [{"role": "user"', "line 2: is no JSON"),
        ('{"text": "hello"}', "line 2: got"),
        ('{"messages": []}', "line 2: got"),
        ('{"messages": [{"role": "user"}]}', "line 2: got"),
        ("[1, 2]", "line 2: got"),
    ],
)
def test_a_broken_row_is_named(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + text + "\n")
    with pytest.raises(DataError, match=message):
        read_demonstrations([path])


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_demonstrations([tmp_path / "none.jsonl"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_demonstrations([tmp_path / "empty.jsonl"])
