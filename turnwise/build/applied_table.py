"""Prints the table of the settings that are in force."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO, TypeVar

from turnwise.config import Applied

if TYPE_CHECKING:
    from turnwise.pipelines.agentic import AgenticPipeline
    from turnwise.pipelines.sft import SFTPipeline

P = TypeVar("P", "AgenticPipeline", "SFTPipeline")


def shown(pipeline: P, is_quiet: bool) -> P:
    """Prints the pipeline's table, unless the run is quiet, and returns the pipeline."""
    from turnwise.build.run_table import applied_settings

    if not is_quiet:
        print_applied(applied_settings(pipeline))
    return pipeline


def print_applied(applied: Applied, file: TextIO | None = None) -> None:
    """Prints the rows: as a table on a terminal, as aligned lines elsewhere. Warnings were printed when the config was read."""
    file = file or sys.stdout
    if not file.isatty():
        print(applied.table(), file=file, flush=True)
        return
    # Imported here: only a terminal needs it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in applied.rows:
        table.add_row(name, Text(text))
    Console(file=file).print(table)
