"""The notebook of the first steps runs as it stands, and what it trains learns."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_steps.ipynb"


def successes(notebook) -> list[float]:
    """The success rates in the tables of its evaluations."""
    texts = [
        output["text"] for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    ]
    return [float(number) for number in re.findall(r"(?m)^all +([\d.]+)", "".join(texts))]


def test_the_notebook_runs_and_its_model_learns(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before, after = successes(notebook)
    assert before < 0.65 and after > 0.75, "the outputs that are stored"
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    before, after = successes(notebook)
    assert before < 0.65 and after > 0.75
    assert any(
        "image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    )


def test_the_stored_notebook_names_no_folder_of_a_machine() -> None:
    assert not re.search(r'"[^"]*/(home|tmp|root|Users)/', NOTEBOOK.read_text(encoding="utf-8"))
