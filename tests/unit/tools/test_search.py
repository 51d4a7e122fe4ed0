"""The tool `search`."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from messages import says

from turnwise.errors import ConfigError, DataError, NotAvailableError
from turnwise.tools.search import SearchTool

DOCUMENTS = [
    {"id": "cats", "text": "The cat sat on the mat"},
    {"id": 7, "text": "Dogs chase cats, x = 5", "source": "a book"},
    {"id": "light", "text": "Quantum 量子 photons"},
    {"id": "twin", "text": "The cat sat on the mat"},
    {"id": "silent", "text": "…"},
    {"id": "long", "text": "needle " + "hay " * 100},
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return str(path)


def found(path: str, query: str, **config) -> str:
    pytest.importorskip("bm25s")
    return asyncio.run(SearchTool({"documents": path, **config}, None).execute(None, {"query": query}))


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("cat", ["cats", "twin"]),
        ("CHASE photons", ["light", "7"]),
        ("the zebra", ["cats", "twin"]),
        ("5", ["7"]),
        ("量子", ["light"]),
    ],
)
def test_the_best_documents_come_first_with_their_ids(path, query, ids):
    assert [part.split("]")[0].removeprefix("[") for part in found(path, query).split("\n\n")] == ids


@pytest.mark.parametrize(
    ("query", "config", "result"),
    [
        ("mat dogs cats", {"k": 1}, "[7] Dogs chase cats, x = 5"),
        ("needle", {"max_document_length": 10}, "[long] needle hay…"),
        *((query, {}, "No document has any of these words.") for query in ("zebra", "", "… !")),
    ],
)
def test_results_are_the_best_cut_or_said_to_be_none(path, query, config, result):
    assert found(path, query, **config) == result


def test_a_file_that_changed_is_read_anew(tmp_path, path):
    assert found(path, "zebra").startswith("No document")
    with open(path, "a") as file:
        file.write('{"id": "new", "text": "zebra"}\n')
    assert found(path, "zebra") == "[new] zebra"


def test_its_schema_asks_for_a_query(path):
    pytest.importorskip("bm25s")
    function = SearchTool({"documents": path}, None).schema["function"]
    assert (function["name"], function["parameters"]["required"]) == ("search", ["query"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, says("config.documents", "JSONL")),
        (
            {"document": "a"},
            says("'document'", "'documents'"),
        ),
        ({"documents": "a", "k": 0}, says("config.k", "0")),
        ({"documents": "a", "max_document_length": True}, "config.max_document_length is True"),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        SearchTool(config, None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "no such file"),
        ("", says("wrong.jsonl", "word")),
        ('{"id": 1, "text": "…"}\n', says("wrong.jsonl", "word")),
        ('{"id": 1, "title": "a"}\n', says("line 1", "id, title")),
        ('{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}\n', says("line 2", "'1'", "line 1")),
        ("[1]\n", says("wrong.jsonl", "JSON object")),
    ],
)
def test_wrong_documents_are_refused(lines, message, tmp_path):
    pytest.importorskip("bm25s")
    if lines is not None:
        (tmp_path / "wrong.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message):
        SearchTool({"documents": str(tmp_path / "wrong.jsonl")}, None)


def test_without_its_library_it_is_refused(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(NotAvailableError, match=says("bm25s", "pip install -e '.[tools]'")):
        SearchTool({"documents": path}, None)
