"""The table of mutants keeps up with the source: `tests/extras` runs it, and a text that has moved on would
test nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MUTANTS = Path(__file__).parents[2] / "mutants.py"


def test_every_mutant_s_text_is_in_the_source():
    run = subprocess.run([sys.executable, str(MUTANTS), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
