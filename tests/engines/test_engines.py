"""The heavy engines work on this machine, and compute what plain torch computes. Each runs in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = Path(__file__).parent
sys.path.insert(0, str(ENGINES))
from environment import EXTRAS, engine_python  # noqa: E402

TIMEOUT_S = 600


@pytest.mark.parametrize("engine", EXTRAS)
def test_agrees_with_plain_torch(engine):
    environment = os.environ | {"PYTHONPATH": str(ENGINES), "HF_HUB_OFFLINE": "1"}
    script = ENGINES / f"smoke_{engine}.py"
    run = subprocess.run([engine_python(engine), script], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert f"{engine}" in run.stdout
    print(run.stdout)
