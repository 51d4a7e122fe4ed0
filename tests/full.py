"""Everything that can be tested on this machine: `make test-full`. It writes `tests/full_run.json`, which is committed.

CI leaves out what takes longest: it kills a run three times instead of twenty, and tries only the mutants of what has changed
since the revision of that file.
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
    if changes := git("status", "--porcelain"):
        print(f"error: the result would belong to no revision; commit or remove these first:\n{changes}", file=sys.stderr)
        return 2
    revision, minutes = git("rev-parse", "HEAD"), {}
    for part in PARTS:
        started = time.monotonic()
        status = subprocess.run(["make", part], cwd=ROOT, env=os.environ | {"TURNWISE_FULL": "1"}).returncode
        minutes[part] = round((time.monotonic() - started) / 60, 1)
        if status:
            print(f"error: make {part} failed after {minutes[part]} minutes; {RESULT.name} is as it was", file=sys.stderr)
            return 1
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"revision": revision, "date": today, "machine": machine, "minutes": minutes}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"all passed; commit {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
