"""The registered tool `search`: finds documents of a file by BM25, with an index in memory."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.data.word_index import WordIndex
from turnwise.errors import ConfigError, DataError
from turnwise.model_files.hub import local_path
from turnwise.runtime.jsonl import read_jsonl
from turnwise.tools.function_tool import FunctionTool, check_keys

NUMBERS = {"k": 3, "max_document_length": 2000}
"""Numbers in the config with their defaults: maximum documents of a result, and maximum characters shown of
each document."""


class SearchTool(FunctionTool):
    """Searches the documents of `config.documents`, a JSONL file of objects with `id` and `text`. `config`
    may also have the keys of `NUMBERS`. Raises ConfigError if it has another key, doesn't name a file, or a
    number isn't a positive integer; DataError if the file is missing or holds no word, a document has no `id`
    or `text`, or two have the same id; NotAvailableError if bm25s isn't installed."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None) -> None:
        check_keys("tool search", config, ["documents", *NUMBERS])
        self._numbers = NUMBERS | {key: config[key] for key in NUMBERS if key in config}
        for key, value in self._numbers.items():
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"tool search: config.{key} is {value!r}; it must be a whole number above 0"
                )
        name = config.get("documents")
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"tool search: config.documents is {name!r}; name a JSONL file of objects with id and text"
            )
        path = local_path(name)
        version: tuple[int, ...] = ()
        if path.is_file():
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size)
        self._documents, self._index = _indexed(path, version)
        super().__init__(self.search, tool_schema)

    def search(self, query: str) -> str:
        """Searches a collection of documents. Returns those that fit best, each behind its id in brackets.

        Args:
            query: Words that the documents should hold.
        """
        length = self._numbers["max_document_length"]
        shown: list[str] = []
        for number in self._index.best(query, self._numbers["k"]):
            id, text = self._documents[number]
            if len(text) > length:
                text = f"{text[:length]}…"
            shown.append(f"[{id}] {text}")
        return "\n\n".join(shown) or "No document has any of these words."


@lru_cache(maxsize=2)
def _indexed(path: Path, version: tuple[int, ...]) -> tuple[Sequence[tuple[str, str]], WordIndex]:
    """`(id, text)` of a file's documents, and their index. `version`, the file's time and size, is for the
    cache only."""
    texts: dict[str, str] = {}
    places: dict[str, str] = {}
    for place, row in read_jsonl(path):
        id = row.get("id")
        text = row.get("text")
        if isinstance(id, bool) or not isinstance(id, str | int) or not isinstance(text, str):
            raise DataError(
                f"{place}: a document has id (a string or a whole number) and text; this one has "
                f"{', '.join(row)}"
            )
        if str(id) in texts:
            raise DataError(
                f"{place}: the id {id!r} is that of {places[str(id)]} too; ids of documents are unique"
            )
        texts[str(id)] = text
        places[str(id)] = place
    index = WordIndex(texts.values(), "the tool search", "tools")
    if not index.has_words:
        raise DataError(f"{path} has no document with a word; write objects with id and text, one per line")
    return list(texts.items()), index
