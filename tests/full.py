"""Runs everything that can be tested on this machine: `make test-full`. It writes `tests/full_run.json`
and `tests/durations.json`, which are committed.

CI does the same with fewer kills of a run, the mutants of what changed and the short checks of engines. The
file names the parts that have passed, with their minutes, and the engines that this machine has. Given again
on the same revision, the command runs the other parts only.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines"))
import environment  # noqa: E402

RESULT = ROOT / "tests" / "full_run.json"
DURATIONS = ROOT / "tests" / "durations.json"
"""Written by tests/conftest.py."""
PARTS = ("check", "test", "test-extras", "test-engines")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def revision() -> str:
    """The revision of the tree, with a line for each file that isn't as it is there."""
    written = (RESULT.name, DURATIONS.name)
    changes = [line for line in git("status", "--porcelain").splitlines() if not line.endswith(written)]
    return "\n".join([git("rev-parse", "HEAD"), *changes])


def main() -> int:
    tested, _, changes = revision().partition("\n")
    if changes:
        print(
            f"error: the result would belong to no revision; commit or remove these first:\n{changes}",
            file=sys.stderr,
        )
        return 2
    result = {
        "revision": tested,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
    }
    last = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    minutes = last["minutes"] if last.get("revision") == result["revision"] else {}
    failed = []
    for part in PARTS:
        if part in minutes:
            continue
        started = time.monotonic()
        if subprocess.run(
            ["make", part], cwd=ROOT, env=os.environ | {"TURNWISE_FULL": "1", "TURNWISE_DURATIONS": "1"}
        ).returncode:
            failed.append(part)
            continue
        if revision() != tested:
            print(
                f"error: the tree has changed while make {part} ran, so its result belongs to no revision",
                file=sys.stderr,
            )
            return 2
        minutes[part] = round((time.monotonic() - started) / 60, 1)
        written = json.dumps(result | {"minutes": minutes, "engines": environment.made()}, indent=1)
        RESULT.write_text(f"{written}\n", encoding="utf-8")
    if failed:
        print(
            f"error: make {' and make '.join(failed)} failed; {RESULT.name} names what passed: {minutes}",
            file=sys.stderr,
        )
        return 1
    print(f"all passed; commit {RESULT.relative_to(ROOT)} and {DURATIONS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
