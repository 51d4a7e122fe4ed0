"""`metrics.jsonl`: one JSON object per step, always written."""

import json
from collections.abc import Mapping
from pathlib import Path

from turnwise.protocols import NO_TEXTS, StepTexts
from turnwise.runtime.disk import naming

SENTENCES = "health"
"""The only key of a row whose value isn't a number: sentences by condition."""


class JsonlTracker:
    """Appends `{"step": …, name: value, …}` and flushes, so that the file is whole after every step. The
    step's row also has the sentences about its health, by condition."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        texts: StepTexts = NO_TEXTS,
    ) -> None:
        row: dict[str, object] = {"step": step, **metrics}
        if texts.health:
            row[SENTENCES] = texts.health
        with naming(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The numbers of each row of a `metrics.jsonl`; a last line that was cut by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            rows.append({name: value for name, value in row.items() if name != SENTENCES})
    return rows


def read_sentences(path: Path) -> list[tuple[int, str, str]]:
    """The sentences about health in a `metrics.jsonl`: the step, from 0, after which one was said, its
    condition, and the sentence."""
    sentences = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            sentences += [(row["step"], key, text) for key, text in row.get(SENTENCES, {}).items()]
    return sentences
