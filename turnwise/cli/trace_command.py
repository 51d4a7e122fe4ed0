"""`turnwise trace RUN`: lists the episodes of a run's traces.jsonl, or shows those that are asked for span by
span."""

import argparse
import json
import sys
from pathlib import Path

from turnwise.errors import DataError
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.tracking.spans import Trace
from turnwise.tracking.trace_text import trace_line, trace_text
from turnwise.tracking.traces_file import read_traces


def run(options: argparse.Namespace) -> int:
    """Lists all episodes; with --task, --step or --sibling shows the spans of those that match."""
    path = Path(options.run)
    if path.is_dir():
        path = RunFolder(path).traces
    lost: list[str] = []
    is_listed = options.task is options.step is options.sibling is None
    num_shown = 0
    for trace in read_traces(path, lost):
        if not _matches(trace, options):
            continue
        num_shown += 1
        if options.json:
            print(json.dumps(trace.written(None), ensure_ascii=False))
        else:
            print(trace_line(trace) if is_listed else trace_text(trace))
    for sentence in lost:
        print(f"note: {sentence}", file=sys.stderr)
    if not num_shown:
        raise DataError(
            f"{path} has no episode of that task, step and sibling; `turnwise trace {options.run}` lists "
            "all that it has"
        )
    return 0


def _matches(trace: Trace, options: argparse.Namespace) -> bool:
    asked = {"task": options.task, "step": options.step, "rollout_n": options.sibling}
    return all(value is None or trace.tags.get(tag) == value for tag, value in asked.items())
