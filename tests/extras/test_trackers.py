"""wandb, SwanLab and MLflow themselves keep a run, without network and login, in an environment of their
own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engines"))
from environment import LackingError, engine_python  # noqa: E402

TIMEOUT_S = 600


def test_a_run_is_kept_by_each_of_them(tiny_model: Path, tmp_path: Path) -> None:
    # A home without logins; the network is not needed, and where there is one nothing is sent.
    home = {
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
        "OMP_NUM_THREADS": "1",
    }
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "SWANLAB_", "MLFLOW_"))
    }
    try:
        python = engine_python("trackers")
    except LackingError as error:
        pytest.skip(str(error))
    environment = {**keep, **home}
    script = [python, Path(__file__).parent / "real_trackers.py", tiny_model, tmp_path]
    run = subprocess.run(script, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "wandb, swanlab and mlflow have kept the run" in run.stdout
    assert run.stderr.count("needs neither network nor login") == 2
    cost = [python, ROOT / "benchmarks" / "traces.py", "--mlflow", "--toy"]
    run = subprocess.run(cost, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "trace.backend: mlflow" in run.stdout
