"""No known mistake gets past the tests: the mutants of `tests/mutants.txt` are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_mutant_survives():
    command = [sys.executable, str(Path(__file__).parents[1] / "mutants.py")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
