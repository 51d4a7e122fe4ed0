"""A page about a pipeline: its figures, its curves, and answers before and after reinforcement."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

_NUM_SAMPLES = 5
_HIDDEN = ("parameters", "details", "metrics", "samples")


def write_report(file: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes one HTML file that needs no other."""
    parts = [part for name, result in results.items() for part in _stage(name, result)]
    style = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:2px 1em 2px 0}img{max-width:100%}"
    page = ["<!doctype html><meta charset=utf-8><title>turnwise pipeline</title>", f"<style>{style}</style>", *parts]
    file.write_text("\n".join([*page, *_samples(results)]) + "\n", encoding="utf-8")


def _stage(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2><table>"
    for key, value in result.items():
        if key not in _HIDDEN:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            yield f"<tr><td>{escape(key)}</td><td>{escape(shown)}</td></tr>"
    yield "</table>"
    curve = Path(result.get("curve", ""))
    if curve.is_file():
        yield f'<img alt="learning curve" src="data:image/png;base64,{base64.b64encode(curve.read_bytes()).decode()}">'


def _samples(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The first answers of both evaluations, side by side."""
    before, after = (results.get(f"{kind}_evaluation", {}).get("details", []) for kind in ("sft", "grpo"))
    later = {answer["question"]: answer for answer in after}
    if before:
        yield "<h2>Answers after sft and after grpo</h2><table>"
    for answer in before[:_NUM_SAMPLES]:
        second = later.get(answer["question"], {}).get("completion", "")
        columns = (answer["question"], answer["ground_truth"], answer["completion"], second)
        yield "<tr>" + "".join(f"<td><pre>{escape(str(column))}</pre></td>" for column in columns) + "</tr>"
    if before:
        yield "</table>"
