"""`turnwise view RUN|rollouts.jsonl …`: the episodes of runs as pages, or in the terminal."""

import argparse
import sys
from pathlib import Path

from turnwise.cli.view_runs import ViewedRun, find_runs, refresh
from turnwise.cli.view_text import print_view
from turnwise.errors import ConfigError
from turnwise.report.view.folder import require_own_or_new, write_folder
from turnwise.report.view.server import LiveRuns, ViewServer


def run(options: argparse.Namespace) -> int:
    """Writes the pages of the runs, serves them, or prints them as text."""
    _check(options)
    runs = find_runs(
        options.runs,
        options.tokenizer,
        _steps(options.steps),
        waits=options.port is not None,
    )
    for viewed in runs:
        for note in viewed.notes:
            print(f"note: {note}", file=sys.stderr)
    if options.text:
        return print_view(runs, options)
    if options.port is not None:
        return _serve(runs, options.port)
    folder = Path(options.out) if options.out else runs[0].default_out
    require_own_or_new(folder)
    index = write_folder(folder, [viewed.source for viewed in runs], _progress)
    for viewed in runs:
        for sentence in viewed.left_out():
            print(f"note: {sentence}", file=sys.stderr)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"pages: {index} ({num_bytes / 1e6:,.1f} MB), opened by a double click")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuses options that have no effect together."""
    chosen = [flag for flag in ("text", "port", "out") if vars(options)[flag]]
    if len(chosen) > 1:
        names = " and ".join(f"--{name}" for name in chosen)
        raise ConfigError(f"{names} exclude each other; --text writes no pages, --port makes them when asked")
    for name in ("failed", "trajectory", "no_color"):
        if vars(options)[name] and not options.text:
            raise ConfigError(f"--{name.replace('_', '-')} is for the terminal; add --text")
    if options.port is not None and not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; a port is at most 65535, and 0 is a free one")


def _steps(text: str | None) -> list[str] | None:
    """The words of --steps: numbers, and `last`."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if word != "last" and not word.isdecimal()]
    if wrong or not words:
        raise ConfigError(
            f"--steps {text}: {wrong[:1] or text} isn't a step; write numbers and last, as in 1,50,last"
        )
    return words


def _serve(runs: list[ViewedRun], port: int) -> int:
    by_source = {id(viewed.source): viewed for viewed in runs}
    live = LiveRuns([viewed.source for viewed in runs], lambda source: refresh(by_source[id(source)]))
    server = ViewServer(port, live)
    print(f"pages: {server.url} (on this machine only); Ctrl-C ends it", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
    return 0


def _progress(num_written: int, total: int) -> None:
    if total > 20 and sys.stderr.isatty():
        end = "\n" if num_written == total else ""
        print(f"\rstep {num_written} of {total}", end=end, file=sys.stderr, flush=True)
