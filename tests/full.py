"""Runs everything that can be tested on this machine: `make test-full`. It writes `tests/full_run.json`, which is committed.

CI leaves out what takes longest: it kills a run three times instead of twenty, and tries only the mutants of what has changed
since the revision of that file. A part that passed is not repeated when the command is given again on the same revision.
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
RESULT = ROOT / "tests" / "full_run.json"
PASSED = ROOT / ".pytest_cache" / "full_run.json"
"""The minutes of each part that has passed, by revision."""
PARTS = ("check", "test", "test-extras", "test-engines")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    if changes := git("status", "--porcelain"):
        print(f"error: the result would belong to no revision; commit or remove these first:\n{changes}", file=sys.stderr)
        return 2
    revision = git("rev-parse", "HEAD")
    passed = json.loads(PASSED.read_text()) if PASSED.is_file() else {}
    minutes = passed.get(revision, {})
    for part in PARTS:
        if part in minutes:
            continue
        started = time.monotonic()
        if subprocess.run(["make", part], cwd=ROOT, env=os.environ | {"TURNWISE_FULL": "1"}).returncode:
            print(f"error: make {part} failed; {RESULT.name} is as it was. The parts that passed: {minutes}", file=sys.stderr)
            return 1
        minutes[part] = round((time.monotonic() - started) / 60, 1)
        PASSED.parent.mkdir(exist_ok=True)
        PASSED.write_text(json.dumps({revision: minutes}))
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"revision": revision, "date": today, "machine": machine, "minutes": minutes}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"all passed; commit {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
