"""The page of a pipeline, `report.html`: the outcome first, then each stage with its curve, then answers
before and after."""

import base64
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from turnwise.rl_tool.comparison import with_interval

Results = Mapping[str, Mapping[str, Any]]

NUM_ANSWERS = 5
STAGES = {
    "data": "Rows as demonstrations",
    "rl_data": "Rows as prompts",
    "sft_training": "Training by sft",
    "sft_evaluation": "Evaluation after sft",
    "grpo_training": "Training by grpo",
    "grpo_evaluation": "Evaluation after grpo",
}
"""The stages that the page shows, in order, and their titles."""
_HIDDEN = ("status", "action", "parameters", "details", "metrics", "samples", "sample_keys", "curve")
_COLUMNS = ("question", "truth", "after sft", "after grpo")
_STYLE = """
body { font: 15px sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere }
td, th { padding: 2px 1em 2px 0; text-align: left; vertical-align: top }
img { max-width: 100% }
.outcome { font-size: 1.2em }
.worse { color: #a00 }
.answers { table-layout: fixed; width: 100% }
.answers td { white-space: pre-wrap; font-family: monospace; font-size: 13px; border-top: 1px solid #ccc }
.answers th:nth-child(2) { width: 5em }
"""


def write_report(file: Path, results: Results) -> None:
    """Writes the results of the stages as one self-contained HTML file."""
    head = f"<!doctype html><meta charset=utf-8><title>turnwise pipeline</title><style>{_STYLE}</style>"
    stages = [part for name in STAGES if name in results for part in _stage(STAGES[name], results[name])]
    file.write_text(
        "\n".join([head, *_headline(results), *stages, *_answers(results)]) + "\n", encoding="utf-8"
    )


def _headline(results: Results) -> Iterator[str]:
    """The title: before → after, once both evaluations are there; until then, how far the pipeline is."""
    comparison = results.get("comparison")
    if not comparison:
        names = [STAGES[name] for name in STAGES if name in results]
        yield f"<h1>{len(names)} of {len(STAGES)} stages done</h1>"
        if "sft_evaluation" in results:
            measured = results["sft_evaluation"]
            yield f"<p class=outcome>Accuracy after sft: {measured['accuracy']:.3f}</p>"
        return
    before, after = comparison["held_out"]["before"], comparison["held_out"]["after"]
    verdict = comparison["verdict"]
    yield f"<h1 class={verdict}>Accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f}: {verdict}</h1>"
    yield f"<p class=outcome>{escape(comparison['sentence'])}</p>"
    yield "<table><tr><th></th><th>after sft</th><th>after grpo</th></tr>"
    number = comparison["held_out"]["num_samples"]
    cells = f"<td>{with_interval(before)}</td><td>{with_interval(after)}</td>"
    yield f"<tr><td>accuracy on {number} held-out problems</td>{cells}</tr>"
    if training := comparison["training"]:
        yield (
            f"<tr><td>mean reward in "
            f"training</td><td>{training['before']:.3f}</td><td>{training['after']:.3f}</td></tr>"
        )
    yield "</table>"


def _stage(title: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{title}</h2><table>"
    for key, value in result.items():
        if key not in _HIDDEN and (shown := _shown(value)):
            yield f"<tr><td>{escape(key.replace('_', ' '))}</td><td>{escape(shown)}</td></tr>"
    yield "</table>"
    curve = Path(result.get("curve", ""))
    if curve.is_file():
        yield (
            f'<img alt="learning curve" '
            f'src="data:image/png;base64,{base64.b64encode(curve.read_bytes()).decode()}">'
        )


def _shown(value: Any) -> str:
    """A value in words; "" for what is unknown or empty, which the page leaves out.

    >>> _shown({"1": 0.07, "2": 0.125}), _shown(["a", "b"]), _shown(True), _shown(None)
    ('1: 0.07, 2: 0.125', 'a, b', 'yes', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)


def _answers(results: Results) -> Iterator[str]:
    """A table of the first answers of both evaluations, side by side."""
    before, after = (results.get(f"{kind}_evaluation", {}).get("details", []) for kind in ("sft", "grpo"))
    later = {answer["question"]: answer for answer in after}
    if not before:
        return
    yield "<h2>Answers after sft and after grpo</h2><table class=answers>"
    yield "<tr>" + "".join(f"<th>{column}</th>" for column in _COLUMNS) + "</tr>"
    for answer in before[:NUM_ANSWERS]:
        second = later.get(answer["question"], {}).get("completion", "")
        cells = (answer["question"], answer["ground_truth"], answer["completion"], second)
        yield "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"
    yield "</table>"
