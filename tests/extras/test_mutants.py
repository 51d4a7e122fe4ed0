"""No known mistake gets past the tests: the mutants of `tests/mutants.txt` are killed.

In CI those of what has changed since the last full run (`tests/full_run.json`, by `make test-full`), else all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_mutant_survives():
    command = [sys.executable, str(TESTS / "mutants.py")]
    file = TESTS / "full_run.json"
    last = json.loads(file.read_text()) if file.is_file() and not os.environ.get("TURNWISE_FULL") else {"minutes": {}}
    if "test-extras" in last["minutes"]:
        command += ["--changed", last["revision"]]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
