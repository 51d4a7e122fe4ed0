"""No known mistake gets past the tests: the mutants of `tests/mutants.txt` are killed.

CI runs those that are new, or whose code or tests have changed since the last full run
(`tests/full_run.json`, which `make test-full` writes), and MOST of them where there are more. It has seen
their tests pass already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
RESULT = TESTS / "full_run.json"
MOST = 60
"""About two minutes on a busy machine."""


def test_no_mutant_survives():
    command = [sys.executable, str(TESTS / "mutants.py")]
    if not os.environ.get("TURNWISE_FULL"):
        last = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {"minutes": {}}
        command += ["--green", "--most", str(MOST)]
        command += ["--changed", last["revision"]] if "test-extras" in last["minutes"] else []
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    print(run.stdout)
