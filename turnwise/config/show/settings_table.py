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
        paragraphs: list[str] = []
        for name, text in self.rows:
            paragraph = fill(
                text,
                width,
                initial_indent=name.ljust(indent),
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
            paragraphs.append(paragraph)
        return "\n".join(paragraphs)

    def show(self, file: TextIO | None = None) -> None:
        """Prints the table without the warnings to `file` (default: stdout), as wide as the terminal if
        `file` is one."""
        file = file or sys.stdout
        text = self.text()
        if file.isatty():
            text = self.text(max(get_terminal_size().columns, 40))
        print(text, file=file, flush=True)

    def render(self) -> str:
        """The table, then the warnings and what is missing."""
        lines = [self.text()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.missing:
            lines.append("missing to run this config here:")
            lines += [f"  - {line}" for line in self.missing]
        return "\n".join(lines)
