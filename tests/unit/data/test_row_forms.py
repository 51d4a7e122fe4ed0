"""One conversation is the same from every form of file, and what tables add to it is neither taught nor
shown."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from messages import mentions, says

from turnwise.chat.demonstration import _warn_of_column, encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.config import AgenticConfig
from turnwise.config.schema.sft import SFTConfig
from turnwise.data.bad_rows import BadRows
from turnwise.data.demonstrations import read_rows
from turnwise.data.forms import as_demonstration, as_task
from turnwise.data.padding import plain_arguments, plain_schema
from turnwise.data.prompts import prompt_of, tools_of
from turnwise.data.tables import ParameterColumns, TableRow, read_tables
from turnwise.errors import DataError
from turnwise.examine.demonstrations import read_demonstrations
from turnwise.examine.examined import examine
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.rl_tool.loaded_rows import load
from turnwise.rl_tool.parameters import RowChoice
from turnwise.testing.fakes import byte_tokenizer
from turnwise.trainer.trainer import _demonstrations


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


UNIT = {"type": ["string", "null"], "default": None}
WEATHER = tool("get_weather", city={"type": "string"}, unit=UNIT)
ENTRY = {"type": "object", "properties": {"k": {"type": "integer"}, "l": {"type": "integer"}}}
ADD = tool("add", a={"type": "integer"}, more={"type": "object", "properties": {"b": {"type": "integer"}}})
LIST = tool("list", entries={"type": "array", "items": ENTRY})


def conversation(schema: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": schema["function"]["name"], "arguments": arguments}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "yes"},
    ]
    return {"messages": messages, "tools": [schema]}


ROWS = [
    conversation(WEATHER, {"city": "Oslo", "unit": None}),
    conversation(ADD, {"a": 1, "more": {"b": 2}}),
    conversation(ADD, {"a": 3}),
    conversation(LIST, {"entries": [{"k": 1}, {"l": 2}]}),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "array.json").write_text(json.dumps(ROWS, indent=1))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "table.parquet")
    (folder / "table.ndjson").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_json(folder / "dataset.json")
    dataset.to_parquet(folder / "dataset.parquet")
    dataset.save_to_disk(str(folder / "saved"))
    return [str(path) for path in sorted(folder.iterdir())]


def test_demonstrations_and_prompts_are_alike_to_the_byte_from_every_form(sources: list[str]) -> None:
    template = ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)
    plain = [encode_demonstration(template, row["messages"], row["tools"]).token_ids.tolist() for row in ROWS]
    prompts = [json.dumps(row["messages"][:-1]) for row in ROWS]
    assert len(sources) == 8
    for source in sources:
        rows = list(read_rows([source]))
        assert [
            encode_demonstration(template, r.messages, r.tools).token_ids.tolist() for r in rows
        ] == plain, source
        assert [json.dumps(r.tools) for r in rows] == [json.dumps(row["tools"]) for row in ROWS], source
        columns = [row.columns for row in read_tables([source], "data.train_files")]
        assert [json.dumps(prompt_of(of_row, "messages")[:-1]) for of_row in columns] == prompts, source


def test_arguments_as_json_text_are_an_object_in_a_prompt() -> None:
    row = conversation(WEATHER, {"city": "Oslo"})
    call = row["messages"][1]["tool_calls"][0]["function"]
    call["arguments"] = '{"city": "Oslo"}'
    said = prompt_of(row, "messages")
    assert said[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("schema", "is_kept"),
    [
        ({"type": "string"}, False),
        ({"type": "string", "nullable": True}, True),
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"enum": ["a", "b"]}, False),
        ({"enum": ["a", None]}, True),
        ({"$ref": "#/$defs/maybe"}, True),
        ({"$ref": "#/$defs/text"}, False),
        ({}, True),
    ],
)
def test_a_null_stays_where_the_schema_allows_null(schema: dict[str, Any], is_kept: bool) -> None:
    definitions = {"maybe": {"type": ["string", "null"]}, "text": {"type": "string"}}
    parameters = {"properties": {"x": schema, "deep": {"properties": {"x": schema}}}, "$defs": definitions}
    expected = {"x": None, "deep": {"x": None}} if is_kept else {"deep": {}}
    assert plain_arguments({"x": None, "deep": {"x": None}, "foreign": None}, parameters) == expected


def test_a_null_default_stays_where_null_is_allowed() -> None:
    padded = {
        "properties": {"a": {"type": "string", "default": None}, "b": UNIT, "default": None},
        "required": None,
    }
    assert plain_schema(padded) == {"properties": {"a": {"type": "string"}, "b": UNIT}}


def test_columns_lose_padding_at_any_depth_and_keep_null_columns(tmp_path: Path) -> None:
    rows = [
        {"answer": None, "cases": [{"in": 1}], "info": {"a": {"b": 1}}},
        {"answer": "4", "cases": [{"out": 2}], "info": {"c": 1}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [
        dict(row.columns) for row in read_tables([str(tmp_path / "rows.parquet")], "data.train_files")
    ] == rows


def test_equal_values_under_one_name_are_no_clash() -> None:
    row = TableRow(
        "line 1", {"reward_model": {"ground_truth": "4"}, "extra_info": {"answer": {"ground_truth": "4"}}}
    )
    user = {
        "extra_info": {"interaction_kwargs": {"ground_truth": "9"}},
        "reward_model": {"ground_truth": "4"},
    }

    def score(completions: list[str], ground_truth: list[str]) -> list[float]:
        return []

    wanted = ParameterColumns.by(score, ["completions"])
    for columns in (row.columns, user):
        wanted.check([TableRow("line 1", columns)], "data.reward score")
        assert wanted.choose(columns) == {"ground_truth": "4"}
    for first, second in ((1, True), ("072", 72), ("72", 73), ([72], ["72"])):
        with pytest.raises(DataError, match="has it twice"):
            row = TableRow("line 1", {"a": {"ground_truth": first}, "b": {"ground_truth": second}})
            wanted.check([row], "data.reward score")
    for first, second in (("72", 72), (72.0, "72"), (0.5, "0.5")):
        wanted.check(
            [TableRow("line 1", {"a": {"ground_truth": first}, "b": {"ground_truth": second}})],
            "data.reward score",
        )


FORMS: dict[str, dict[str, Any]] = {
    "sharegpt": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    "alpaca": {"instruction": "2+2?", "input": "", "output": "4"},
    "question_answer": {"question": "2+2?", "answer": "4"},
    "prompt_completion": {"prompt": "2+2?", "completion": "4"},
}


@pytest.mark.parametrize("form", FORMS)
def test_published_forms_are_read_by_name_and_named_otherwise(form: str, tmp_path: Path) -> None:
    row = FORMS[form]
    assert as_demonstration(row, form)["messages"] == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    task = as_task(row, form)
    assert (task["prompt"], task["ground_truth"]) == ("2+2?", "4")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert len(list(read_rows([path], form=form))) == 1
    with pytest.raises(DataError, match=f"data.format={form}"):
        list(read_rows([path]))


def test_a_reward_that_misses_the_answer_names_the_form_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(FORMS["prompt_completion"]) + "\n")
    section = {"train_files": str(path), "reward": "accuracy"}
    with pytest.raises(DataError, match=r"ground_truth or answer.*data\.format=prompt_completion"):
        _ = (
            examine(AgenticConfig.model_validate({"pretrain": "m", "data": section, "max_steps": 1}))
            .rows("train")
            .rows
        )
    section["format"] = "prompt_completion"
    ((_, row),) = (
        examine(AgenticConfig.model_validate({"pretrain": "m", "data": section, "max_steps": 1}))
        .rows("train")
        .rows
    )
    assert row.payload["ground_truth"] == "4"


def test_flags_and_calls_of_sharegpt_are_carried_over() -> None:
    turns = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}', "weight": 0},
        {"from": "observation", "value": "1"},
    ]
    _, call, result = as_demonstration({"conversations": turns}, "sharegpt")["messages"]
    assert call["weight"] == 0 and call["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert result == {"role": "tool", "content": "1"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        ("a.jsonl", b"PAR1", "Parquet"),
        ("a.jsonl", b"PK\x03\x04", "zip archive"),
        ("a.jsonl.gz", b"plain", "isn't compressed"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], "isn't whole"),
        ("a.json", b'{\n"data": [\n{"prompt": "a"}]}', says("rows", "`data`")),
        ("a.json", b"[1, 2]", says("row 1", "JSON object")),
        ("a.csv", b"a,a\n1,2\n", "'a' twice"),
        ("a.csv", b"a,b\n1\n", "line 2 has 1 cells"),
        ("a.csv", b"a;b\n1;2\n", "separates columns"),
    ],
)
def test_the_message_names_the_right_cause(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_tables([str(tmp_path / name)], "data.train_files")


def test_cells_of_a_table_are_texts_and_empty_ones_null(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,answer\n"a, ""b""\nc",007\nd,\n')
    rows = read_tables([str(tmp_path / "rows.csv")], "data.train_files")
    assert [dict(row.columns) for row in rows] == [
        {"prompt": 'a, "b"\nc', "answer": "007"},
        {"prompt": "d", "answer": None},
    ]
    assert rows[1].place.endswith("line 4")


def test_bad_rows_are_counted_at_once_and_ten_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 12 + json.dumps(ROWS[0]) + "\n[1]\n")
    bad = BadRows()
    assert len(list(read_rows([tmp_path / "rows.jsonl"], bad=bad))) == 1
    with pytest.raises(DataError, match=says("13 rows")) as caught:
        bad.refuse()
    assert str(caught.value).count("rows.jsonl, line") == 10 and "3 more" in str(caught.value)
    bad.leave_out("train_files", 14)
    assert mentions(caplog.text, "13 of 14 rows")
    with pytest.raises(DataError, match="none of 13 rows"):
        bad.leave_out("train_files", 13)


TABLE = pyarrow.Table.from_pylist([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])


def test_a_table_of_arrow_in_python_is_read_by_rows() -> None:
    rows = read_tables([f"{__name__}:TABLE"], "data.train_files")
    assert [dict(row.columns) for row in rows] == TABLE.to_pylist()


@pytest.mark.parametrize("arguments", ["", "{}", None])
def test_a_call_without_arguments_has_an_empty_object_in_a_prompt(arguments: str | None) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    prompt = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert prompt_of({"prompt": prompt}, "prompt")[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("is_text", [False, True])
def test_a_function_s_schema_alone_is_a_tool_as_in_sharegpt(is_text: bool, tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "Sun."},
    ]
    alone = [WEATHER["function"]]
    row = {"conversations": turns, "tools": json.dumps(alone) if is_text else alone}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (read,) = read_rows([path], form="sharegpt")
    assert list(read.tools) == tools_of(row) == [WEATHER]


def test_a_format_for_rows_of_messages_is_left_out() -> None:
    with pytest.raises(DataError, match=r"without data\.format"):
        as_task({"messages": [], "answer": "4"}, "alpaca")


def test_speakers_of_sharegpt_may_be_padded_with_null() -> None:
    turns = [
        {"from": None, "value": None, "role": "user", "content": "Hi"},
        {"from": "gpt", "value": "Ho", "role": None},
    ]
    roles = [
        message["role"] for message in as_demonstration({"conversations": turns}, "sharegpt")["messages"]
    ]
    assert roles == ["user", "assistant"]


def test_a_saved_dataset_of_one_split_needs_no_split(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict({"train": split}).save_to_disk(str(tmp_path / "one"))
    assert [dict(row.columns) for row in read_tables([str(tmp_path / "one")], "data.train_files")] == [
        {"prompt": "a"}
    ]


def test_the_tool_reads_rows_in_python_without_padding() -> None:
    rows = [{"prompt": row["messages"][:-1], "tools": row["tools"], "ground_truth": "x"} for row in ROWS]
    plain = load(RowChoice(dataset=rows), "rl", {}).rows
    for table in (pyarrow.Table.from_pylist(rows), datasets.Dataset.from_list(rows)):
        assert json.dumps(load(RowChoice(dataset=table), "rl", {}).rows) == json.dumps(plain)
    plain = load(RowChoice(dataset=ROWS), "sft", {}).rows
    assert json.dumps(
        load(RowChoice(dataset=datasets.Dataset.from_list(ROWS)), "sft", {}).rows
    ) == json.dumps(plain)
    assert plain[0]["messages"] == ROWS[0]["messages"]


@pytest.mark.parametrize(
    ("flag", "is_taken"),
    [
        ({"weight": 0}, False),
        ({"trainable": False}, False),
        ({"train": False}, False),
        ({"loss": 0.0}, False),
        ({"loss_mask": [0, 1]}, False),
        ({"weight": 1, "train": True, "loss": None}, True),
        ({"weight": 0.7}, True),
    ],
)
def test_a_flag_beside_the_messages_is_heeded_or_told(
    flag: dict[str, Any], is_taken: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], **flag}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    _warn_of_column.cache_clear()
    config = SFTConfig.model_validate({"pretrain": "m", "train_files": [str(path)]})
    if is_taken:
        read_demonstrations(config, "train_files", str(path))
        load(RowChoice(dataset=[row]), "sft", {})
        assert ("weight" in caplog.text) is (flag["weight"] == 0.7)
        return
    (key,) = flag
    with pytest.raises(DataError, match=f"line 1: the row has .*`{key}`"):
        read_demonstrations(config, "train_files", str(path))
    with pytest.raises(DataError, match=f"row 1: the row has .*`{key}`"):
        load(RowChoice(dataset=[row]), "sft", {})


def test_the_trainer_and_the_tool_take_a_table_of_arrow(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    table = pyarrow.Table.from_pylist([row])
    (file,) = _demonstrations(table, {"output_dir": str(tmp_path)})
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == [row]
    assert load(RowChoice(dataset=table), "sft", {}).rows[0]["messages"] == row["messages"]
    with pytest.raises(DataError, match="from_pandas"):
        _demonstrations(table.to_pandas(), {"output_dir": str(tmp_path)})
    for several in (datasets.DatasetDict({"train": datasets.Dataset.from_list([row])}), row):
        with pytest.raises(DataError, match=says("data sets")):
            _demonstrations(several, {"output_dir": str(tmp_path)})
        with pytest.raises(DataError, match=says("data sets")):
            load(RowChoice(dataset=several), "sft", {})
