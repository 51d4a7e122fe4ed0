"""The console that commands print on."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 128
"""Characters per line if the output goes to a file or a pipe."""


def open_console(no_color: bool = False) -> "Console":
    """A console that interprets no markup. It has colours unless `no_color`, NO_COLOR or a missing terminal
    forbids them."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH
    return Console(
        file=sys.stdout, width=width, no_color=no_color or None, highlight=False, markup=False, emoji=False
    )


def printable(text: str) -> str:
    """The text with unprintable characters escaped, except newlines.

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\n'
    """
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
