"""How long a user waits before anything happens: `import turnwise` and `turnwise config`.

    python benchmarks/startup.py [--runs N]

Each command is a whole process; the pairs run in turn, and medians are quoted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import describe_machine
from toy import parse_arguments

CONFIG = Path(__file__).parent.parent / "examples" / "frozen_lake" / "agentic.yaml"
COMMANDS = {
    "import numpy": [sys.executable, "-c", "import numpy"],
    "import turnwise, types, protocols": [
        sys.executable,
        "-c",
        "import turnwise, turnwise.types, turnwise.protocols",
    ],
    "turnwise config": [sys.executable, "-m", "turnwise.cli.main", "config", str(CONFIG)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "startup.json"))
    options = parse_arguments(parser, runs=1)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(options.runs + 1):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if run:  # The first round fills the file caches.
                times[name].append(time.perf_counter() - started)
    numpy = times["import numpy"]
    over = [a - b for a, b in zip(times["import turnwise, types, protocols"], numpy, strict=True)]
    result = {
        "median_s": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "turnwise_over_numpy_s": round(statistics.median(over), 3),
        "runs": options.runs,
        "machine": describe_machine(),
    }
    Path(options.out).parent.mkdir(exist_ok=True)
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
