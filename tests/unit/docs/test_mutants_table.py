"""The table of mutants keeps up with the source: `tests/extras` runs it, and a text that has moved on would
test nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[2] / "mutants.py"
TABLE = """About the table.

@ one.py: unit/test_one.py::test_one
first
  - 1
  + 2
@ two.py: unit/test_two.py::test_two
second
  - 1
  + 2
"""
CODE = '''"""A module."""
a: int = 1
"""An attribute."""
'''


def test_every_mutant_s_text_is_in_the_source():
    run = subprocess.run([sys.executable, str(MUTANTS), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """The names of the mutants that have changed since the only commit of a repository, after a file was
    written."""
    monkeypatch.syspath_prepend(str(MUTANTS.parent))
    module = importlib.import_module("mutants")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in (
        "turnwise/one.py",
        "turnwise/two.py",
        "tests/unit/test_one.py",
        "tests/unit/test_two.py",
        "tests/mutants.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TABLE if name.endswith(".txt") else CODE)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)

    def changed(path, text, revision="HEAD"):
        (tmp_path / path).write_text(text)
        table = (tmp_path / "tests/mutants.txt").read_text()
        return [mutant.name for mutant in module.changed(module.read_mutants(table), revision)]

    return changed


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("turnwise/two.py", "b = 2", ["second"]),
        ("turnwise/three.py", "b = 2", []),
        ("turnwise/two.py", '"""A module."""\na: int = 1  # a comment\n"""Another text."""\n', []),
        ("tests/unit/test_one.py", "", ["first"]),
        ("tests/unit/test_one.py", f"{CODE}def test_one():\n    assert a\n", ["first"]),
        ("tests/unit/test_one.py", f"{CODE}def test_another():\n    assert a\n", []),
        ("tests/mutants.txt", TABLE.replace("second", "another"), ["another"]),
        ("tests/mutants.txt", TABLE.replace("About", "More about"), []),
    ],
)
def test_mutants_of_what_has_changed(changed, path, text, names):
    assert changed(path, text) == names


def test_mutants_of_a_file_that_is_gone(changed, tmp_path):
    (tmp_path / "turnwise/two.py").unlink()
    assert changed("turnwise/three.py", "b = 2") == ["second"]


def test_all_mutants_where_git_does_not_know_the_revision(changed):
    assert changed("turnwise/one.py", "a = 1", revision="0" * 40) == ["first", "second"]
