"""`turnwise convert FROM TO`: rollouts.jsonl as OpenEnv's TrainingTrace, and back."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from turnwise.cli.options import new_file
from turnwise.errors import ConfigError, DataError, counted
from turnwise.rollout.foreign_trace import ForeignTraces, checked_trace
from turnwise.rollout.training_trace import own_lines, written_traces
from turnwise.runtime.disk import naming


def run(options: argparse.Namespace) -> int:
    """Converts a file into a new one; its first line says which of the two it is. A file that can't be
    converted leaves none behind."""
    source = Path(options.source)
    target = new_file(options.target, "TO")
    is_trace = _is_trace(source)
    if not is_trace and (options.group_size is not None or options.rewards):
        raise ConfigError(
            f"--group-size and --rewards are for a TrainingTrace, and {source} is a rollouts.jsonl"
        )
    lines = _rollouts(source, options) if is_trace else written_traces(_lines(source))
    num_lines = 0
    with ExitStack() as on_error:
        on_error.callback(target.unlink, missing_ok=True)
        with target.open("xb") as file, naming(target):
            for line in lines:
                file.write(line)
                file.write(b"\n")
                num_lines += 1
        on_error.pop_all()
    noun = "trajectory" if is_trace else "trace"
    print(f"converted  {target}: {counted(num_lines, noun)}")
    return 0


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line that isn't blank, with its place."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a rollouts.jsonl or a file of TrainingTraces")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", line


def _is_trace(path: Path) -> bool:
    place, line = next(_lines(path), ("", b""))
    if not place:
        raise DataError(f"{path} is empty")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{place} isn't JSON ({fault}); was the file cut in the middle?") from fault
    if not isinstance(first, dict) or "turns" not in first:
        raise DataError(f"{place} is neither a line of rollouts.jsonl nor a TrainingTrace: it has no `turns`")
    return "task" not in first


def _rollouts(source: Path, options: argparse.Namespace) -> Iterator[bytes]:
    """The lines of rollouts.jsonl for those of a file of traces: ours as they were, in their order; those of
    another program group by group."""
    rewards = None
    if options.rewards:
        rewards = _rewards(Path(options.rewards))
    foreign = ForeignTraces(options.group_size, rewards)
    num_own = 0
    num_foreign = 0
    for place, line in _lines(source):
        trace = checked_trace(line, place)
        own = own_lines(trace, place)
        if own is None:
            foreign.add(trace, place)
            num_foreign += 1
        else:
            yield from own
            num_own += 1
    if num_own and num_foreign:
        raise DataError(
            f"{source} has {num_own} traces of turnwise and {num_foreign} of other programs; convert them "
            "one by one"
        )
    if num_own and (rewards is not None or options.group_size is not None):
        print(f"note: {source} has its own groups and rewards; the options have no effect", file=sys.stderr)
    if num_foreign:
        yield from foreign.lines()


def _rewards(path: Path) -> list[float]:
    """One number a line."""
    rewards = []
    for place, line in _lines(path):
        try:
            rewards.append(float(line))
        except ValueError:
            raise DataError(f"{place} is {line.strip()[:40]!r}; a line of --rewards is one number") from None
    return rewards
