"""Benchmarks that need another program for their comparison run their own side at toy size, so that they can't rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_arrays_go_to_another_process_and_back() -> None:
    command = [sys.executable, str(BENCHMARKS / "process_arrays.py"), "--megabytes", "1", "--rounds", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={"PYTHONPATH": str(BENCHMARKS.parent)})
    assert min(json.loads(done.stdout)["seconds"].values()) > 0


def test_a_timed_step_of_end_to_end_trains(tiny_model: Path) -> None:
    """With random weights too: all groups score alike, and the step must cost what TRL's costs."""
    job = {"model": str(tiny_model), "threads": 1, "steps": 3, "groups": 2, "group_size": 2, "max_turns": 2}
    command = [sys.executable, str(BENCHMARKS / "end_to_end_own.py"), json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={"PYTHONPATH": str(BENCHMARKS.parent)})
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer["step_s"]) == len(answer["merged"]) == 3
    assert all(step["total"] > step["sampled"] > 0 for step in answer["tokens"])
