"""The table of settings, as rows and as text."""

import sys
from dataclasses import dataclass, field
from shutil import get_terminal_size
from textwrap import fill
from typing import TextIO

SettingRow = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """The settings in force: `(name, text)` rows, warnings, and missing features or libraries."""

    rows: list[SettingRow]
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def text(self, width: int = sys.maxsize) -> str:
        """The rows, aligned, in lines of at most `width` characters."""
        indent = max(len(name) for name, _ in self.rows) + 2
        return "\n".join(
            fill(
                text,
                width,
                initial_indent=name.ljust(indent),
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
            for name, text in self.rows
        )

    def show(self, file: TextIO | None = None) -> None:
        """Prints the table without the warnings to `file` (default: stdout), as wide as the terminal if
        `file` is one."""
        file = file or sys.stdout
        print(
            self.text(max(get_terminal_size().columns, 40)) if file.isatty() else self.text(),
            file=file,
            flush=True,
        )

    def render(self) -> str:
        """The table, then the warnings and what is missing."""
        lines = [self.text(), *(f"warning: {warning}" for warning in self.warnings)]
        lines += (
            ["missing to run this config here:", *(f"  - {line}" for line in self.missing)]
            if self.missing
            else []
        )
        return "\n".join(lines)
