"""`metrics.jsonl`: one JSON object a step, always written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class JsonlTracker:
    """Appends `{"step": …, name: value, …}` and flushes, so that the file is whole after every step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.jsonl`; a last line that was cut by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows
