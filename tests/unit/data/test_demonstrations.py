"""Reading JSONL demonstrations, and what is said of rows that aren't any."""

from __future__ import annotations

import json
import re

import pytest
from messages import says

from turnwise.data.demonstrations import read_demonstrations, read_rows
from turnwise.errors import DataError

ROW = {"messages": [{"role": "user", "content": "√?"}, {"role": "assistant", "content": "yes"}]}


def test_rows_of_all_files_in_order(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW) + "\n")
    second.write_text(json.dumps({"messages": ROW["messages"][:1]}) + "\n")
    assert [len(m) for m in read_demonstrations([first, second])] == [2, 2, 1]


ANSWER = {"role": "assistant", "content": "yes"}
TEXT = {"type": "text", "text": "what?"}


def written(*messages):
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [{"role": "user"', says("JSON", "Expecting")),
        (b"[" * 100_000, says("JSON", "recursion")),
        (b"[1, 2]", says("[1, 2]", "JSON object")),
        (b'{"text": "hello"}', says("`messages`", "row")),
        (b'{"messages": []}', says("`messages`", "'[]'")),
        (b'{"messages": "hello"}', says("`messages`", "'hello'")),
        (written("hello", ANSWER), says("message 0", "'hello'", "object")),
        (written({"role": "user"}, ANSWER), says("message 0", "'None'", "string")),
        (
            written({"role": "user", "content": 7}, ANSWER),
            says("message 0", "'7'", "string"),
        ),
        (written({"role": "user", "content": ["a"]}, ANSWER), says("message 0", "content")),
        (
            written({"role": "user", "content": [TEXT, {"type": "image", "image": "a.png"}]}, ANSWER),
            says("message 0", "picture"),
        ),
        (
            written(ANSWER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
            says("message 1", "picture"),
        ),
        (
            written({"role": "bot", "content": "a"}, ANSWER),
            says("message 0", "'bot'", "system, user"),
        ),
        (written({"content": "a"}, ANSWER), says("message 0", "role", "'None'")),
        (written({"role": [], "content": "a"}, ANSWER), says("message 0", "role", "'[]'")),
        ('{"messages": "Füße"}'.encode("latin-1"), says("UTF-8", "0xfc")),
        (b"\x7fELF\x00\xff", "isn't UTF-8"),
        (b'{"messages": "\\ud800"}', says("holds", r"'\ud800'")),
        (b'{"messages": [{"\\uDFFF": 1}]}', says("holds", r"'\udfff'")),
    ],
)
def test_a_broken_row_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError) as caught:
        read_demonstrations([path])
    assert str(caught.value).startswith(f"{path}, line 2") and re.search(message, str(caught.value))


def test_a_byte_order_mark_and_whole_pairs_are_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + written({"role": "user", "content": "\U0001f600"}, ANSWER)
    )
    assert read_demonstrations([tmp_path / "a.jsonl"])[0][0]["content"] == "\U0001f600"


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_demonstrations([tmp_path / "none.jsonl"])
    with pytest.raises(DataError, match=says("folder", "JSONL")):
        read_demonstrations([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_demonstrations([tmp_path / "empty.jsonl"])


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_rows_may_hold_tools_and_calls(tmp_path):
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    [row] = read_rows([tmp_path / "rows.jsonl"])
    assert row.messages == messages and row.tools == tools


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tools": "add"}, says("`tools`", "'add'")),
        ({"tools": [{"name": "add"}]}, says("has", "`tools`")),
        ({"calls": [{"function": {}}]}, says("message 1", "tool_calls")),
        ({"calls": [{"function": {"name": "add", "arguments": "[1]"}}]}, says("message 1", "tool_calls")),
        ({"calls": [{"function": {"name": "add", "arguments": "{"}}]}, says("message 1", "tool_calls")),
    ],
)
def test_tools_and_calls_of_another_form_are_named(tmp_path, row, said):
    answer = {"role": "assistant", "content": "", "tool_calls": row.pop("calls", [])}
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "?"}, answer], **row}) + "\n"
    )
    with pytest.raises(DataError, match=said):
        list(read_rows([tmp_path / "rows.jsonl"]))
