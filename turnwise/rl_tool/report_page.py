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
    lines = [head, *_headline(results)]
    for name, title in STAGES.items():
        if name in results:
            lines += _stage(title, results[name])
    lines += _answers(results)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _headline(results: Results) -> Iterator[str]:
    """The title: before → after, once both evaluations are there; until then, how far the pipeline is."""
    comparison = results.get("comparison")
    if not comparison:
        names = [STAGES[name] for name in STAGES if name in results]
        yield f"<h1>{len(names)} of {len(STAGES)} stages done</h1>"
        if "sft_evaluation" in results:
            evaluation = results["sft_evaluation"]
            yield f"<p class=outcome>Accuracy after sft: {evaluation['accuracy']:.3f}</p>"
        return
    held_out = comparison["held_out"]
    sft = held_out["before"]
    grpo = held_out["after"]
    verdict = comparison["verdict"]
    yield f"<h1 class={verdict}>Accuracy {sft['accuracy']:.3f} → {grpo['accuracy']:.3f}: {verdict}</h1>"
    yield f"<p class=outcome>{escape(comparison['sentence'])}</p>"
    yield "<table><tr><th></th><th>after sft</th><th>after grpo</th></tr>"
    cells = f"<td>{with_interval(sft)}</td><td>{with_interval(grpo)}</td>"
    yield f"<tr><td>accuracy on {held_out['num_samples']} held-out problems</td>{cells}</tr>"
    training = comparison["training"]
    if training:
        cells = f"<td>{training['before']:.3f}</td><td>{training['after']:.3f}</td>"
        yield f"<tr><td>mean reward in training</td>{cells}</tr>"
    yield "</table>"


def _stage(title: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{title}</h2><table>"
    for key, value in result.items():
        if key in _HIDDEN:
            continue
        text = _shown(value)
        if text:
            yield f"<tr><td>{escape(key.replace('_', ' '))}</td><td>{escape(text)}</td></tr>"
    yield "</table>"
    curve = Path(result.get("curve", ""))
    if curve.is_file():
        picture = base64.b64encode(curve.read_bytes()).decode()
        yield f'<img alt="learning curve" src="data:image/png;base64,{picture}">'


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
    sft_answers = _details(results, "sft_evaluation")
    if not sft_answers:
        return
    grpo_completions = {
        answer["question"]: answer.get("completion", "") for answer in _details(results, "grpo_evaluation")
    }
    yield "<h2>Answers after sft and after grpo</h2><table class=answers>"
    yield "<tr>" + "".join(f"<th>{column}</th>" for column in _COLUMNS) + "</tr>"
    for answer in sft_answers[:NUM_ANSWERS]:
        question = answer["question"]
        texts = (
            question,
            answer["ground_truth"],
            answer["completion"],
            grpo_completions.get(question, ""),
        )
        yield "<tr>" + "".join(f"<td>{escape(str(text))}</td>" for text in texts) + "</tr>"
    yield "</table>"


def _details(results: Results, stage: str) -> list[Mapping[str, Any]]:
    answers: list[Mapping[str, Any]] = results.get(stage, {}).get("details", [])
    return answers
