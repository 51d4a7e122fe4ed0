"""What rich draws, as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def plain(renderable: RenderableType, width: int = 120) -> str:
    """The lines of a drawing without colours."""
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
