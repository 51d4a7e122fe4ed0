"""Runs everything that can be tested on this machine: `make test-full`. It writes `tests/full_run.json`, which is committed.

CI does the same but for kills of a run: three instead of twenty. The file names the parts that have passed, with their minutes.
Given again on the same revision, the command runs the others only.
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
PARTS = ("check", "test", "test-extras", "test-engines")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    if changes := [line for line in git("status", "--porcelain").splitlines() if RESULT.name not in line]:
        listed = "\n".join(changes)
        print(f"error: the result would belong to no revision; commit or remove these first:\n{listed}", file=sys.stderr)
        return 2
    result = {
        "revision": git("rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    last = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    minutes = last["minutes"] if last.get("revision") == result["revision"] else {}
    failed = []
    for part in PARTS:
        if part in minutes:
            continue
        started = time.monotonic()
        if subprocess.run(["make", part], cwd=ROOT, env=os.environ | {"TURNWISE_FULL": "1"}).returncode:
            failed.append(part)
            continue
        minutes[part] = round((time.monotonic() - started) / 60, 1)
        RESULT.write_text(json.dumps(result | {"minutes": minutes}, indent=1) + "\n", encoding="utf-8")
    if failed:
        print(f"error: make {' and make '.join(failed)} failed; {RESULT.name} names what passed: {minutes}", file=sys.stderr)
        return 1
    print(f"all passed; commit {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
