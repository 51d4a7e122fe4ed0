"""`python -m turnwise`."""

import subprocess
import sys

import turnwise


def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "turnwise", "--version"], capture_output=True, text=True)
    assert run.returncode == 0 and turnwise.__version__ in run.stdout
