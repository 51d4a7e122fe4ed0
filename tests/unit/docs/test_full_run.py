"""`make test-full` writes a result that belongs to a revision, or none."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path

import pytest

FULL = Path(__file__).parents[2] / "full.py"
MAKEFILE = "check:\n\ttrue\ntest test-extras test-engines:\n\t@test ! -e $@-fails\n"


@pytest.fixture
def full(tmp_path, monkeypatch):
    """The module on a repository of its own, whose parts fail where a file says so."""
    monkeypatch.syspath_prepend(str(FULL.parent))
    module = importlib.import_module("full")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULT", tmp_path / "tests" / "full_run.json")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").touch()
    (tmp_path / ".gitignore").write_text("*-fails\n")
    commit(tmp_path, MAKEFILE)
    return module


def commit(folder: Path, makefile: str) -> None:
    (folder / "Makefile").write_text(makefile)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)


def test_a_dirty_tree_is_refused(full, capsys):
    (full.ROOT / "new.py").write_text("")
    assert full.main() == 2
    assert "new.py" in capsys.readouterr().err and not full.RESULT.exists()


def test_the_parts_that_passed_are_kept_and_the_others_run_again(full):
    (full.ROOT / "test-fails").write_text("")
    assert full.main() == 1
    first = json.loads(full.RESULT.read_text())
    assert list(first["minutes"]) == ["check", "test-extras", "test-engines"]
    (full.ROOT / "test-fails").unlink()
    (full.ROOT / "test-extras-fails").write_text("")  # It has passed and isn't asked again.
    assert full.main() == 0
    result = json.loads(full.RESULT.read_text())
    assert result["revision"] == full.git("rev-parse", "HEAD") == first["revision"] and result["date"]
    assert set(result["minutes"]) == set(full.PARTS)


def test_nothing_is_kept_from_another_revision(full):
    full.main()
    commit(full.ROOT, MAKEFILE + "# another\n")
    (full.ROOT / "test-fails").write_text("")
    assert full.main() == 1
    assert "test" not in json.loads(full.RESULT.read_text())["minutes"]


def test_a_part_that_ran_while_the_tree_changed_does_not_count(full, capsys):
    commit(full.ROOT, MAKEFILE.replace("true", "touch left_over"))
    assert full.main() == 2
    assert "has changed while make check ran" in capsys.readouterr().err and not full.RESULT.exists()
