"""Writes the tasks of a taskset of verifiers as rows.

    python examples/verifiers/rows.py TASKSET [--num N] [--held-out N] [--harness NAME] [--out DIR]

TASKSET is the name of an installed package, or of a module of this folder. The last tasks are held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from with_verifiers import task_at

from turnwise.cli.main import exit_status
from turnwise.runtime.replaceable import write_new_or_same


def row(taskset: str, number: int, harness: str) -> dict[str, Any]:
    """A row: its prompt is there to be read, verifiers shows the task to the model."""
    prompt = task_at(taskset, number).data.prompt_text
    return {
        "prompt": prompt or f"task {number} of {taskset}",
        "taskset": taskset,
        "number": number,
        "harness": harness,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("taskset")
    parser.add_argument("--num", type=int, default=1100, help="tasks in all (default: 1,100)")
    parser.add_argument("--held-out", type=int, default=100, help="tasks to validate on (default: 100)")
    parser.add_argument("--harness", default="one_answer", help="who plays (default: one_answer)")
    parser.add_argument("--out", type=Path, default=Path("runs/verifiers"))
    options = parser.parse_args()
    try:
        rows = [row(options.taskset, number, options.harness) for number in range(options.num)]
    except StopIteration:
        sys.exit(f"error: {options.taskset} has fewer than {options.num} tasks; say how many with --num")
    except (ModuleNotFoundError, ValueError) as fault:
        sys.exit(f"error: {fault}")
    options.out.mkdir(parents=True, exist_ok=True)
    num_trained = options.num - options.held_out
    for name, part in (("train", rows[:num_trained]), ("val", rows[num_trained:])):
        text = "".join(json.dumps(each) + "\n" for each in part)
        write_new_or_same(options.out / f"{name}.jsonl", text, "--out")


if __name__ == "__main__":
    sys.exit(exit_status(main))
