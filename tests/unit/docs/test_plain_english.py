"""Words that a reader stumbled over stay out of what users read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
STUMBLED = re.compile(
    r"\b(bears?|mend(s|ed)?|the patience|go on alike|starts? anew|alike and aren't)\b", re.IGNORECASE
)


def test_what_users_read_is_plain() -> None:
    files = [
        *ROOT.glob("turnwise/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.yaml"),
        ROOT / "README.md",
    ]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if STUMBLED.search(line)
    ]
    assert found == []


def test_docstrings_begin_with_what_they_speak_of() -> None:
    """ "That the step asked for." leaves a reader to look for its subject."""
    texts = {
        file: file.read_text(encoding="utf-8")
        for room in ("turnwise", "tests", "benchmarks", "examples")
        for file in ROOT.glob(f"{room}/**/*.py")
    }
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value.value.strip()[:80]}"
        for file, text in texts.items()
        if re.search(r"""["']\s*(Of|That|Those|In which)\b""", text)  # parsing all takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        if re.match(r"\s*(Of|That|Those|In which)\b", node.value.value)
    ]
    assert found == []
