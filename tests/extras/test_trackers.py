"""wandb, SwanLab and MLflow themselves keep a run, without network and login, in an environment of their
own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engines"))
from environment import LackingError, engine_python  # noqa: E402

TIMEOUT_S = 600


def output_of(home: Path, script: Path, *arguments: object) -> tuple[str, str]:
    """What a script prints in the environment of the trackers. Its home has no logins; it needs no network,
    and where there is one nothing is sent."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "SWANLAB_", "MLFLOW_"))
    }
    environment = {
        **kept,
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
        "OMP_NUM_THREADS": "1",
    }
    try:
        python = engine_python("trackers")
    except LackingError as error:
        pytest.skip(str(error))
    command = [python, script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run.stdout, run.stderr


def test_a_run_is_kept_by_each_of_them(tiny_model: Path, tmp_path: Path) -> None:
    printed, errors = output_of(tmp_path, HERE / "real_trackers.py", tiny_model, tmp_path)
    assert "wandb, swanlab and mlflow have kept the run" in printed
    assert errors.count("needs neither network nor login") == 2


def test_a_run_outlives_its_mlflow_server(tiny_model: Path, tmp_path: Path) -> None:
    printed, _ = output_of(tmp_path, HERE / "mlflow_server.py", tiny_model, tmp_path)
    assert "a run outlives its MLflow server" in printed


def test_what_traces_in_mlflow_cost_a_step(tmp_path: Path) -> None:
    printed, _ = output_of(tmp_path, ROOT / "benchmarks" / "traces.py", "--mlflow", "--toy")
    assert "trace.backend: mlflow" in printed
