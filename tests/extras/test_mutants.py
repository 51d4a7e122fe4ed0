"""No known mistake gets past the tests: the mutants of `tests/mutants.txt` are killed.

In CI, which has little time, at most fifty: of those whose code or tests have changed since the last full run
(`tests/full_run.json`, by `make test-full`), or of all where there was none.
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
    if not os.environ.get("TURNWISE_FULL"):
        last = json.loads(file.read_text()) if file.is_file() else {"minutes": {}}
        command += ["--sample", "50"]
        command += ["--changed", last["revision"]] if "test-extras" in last["minutes"] else []
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
