"""Writes figures as files that name turnwise as their maker. No import of matplotlib is needed to recognise
them."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.runtime.disk import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAKER = "turnwise"
"""The program that a picture's metadata name as its maker."""
_MAKER_KEYS = {".png": "Software", ".pdf": "Creator", ".svg": "Creator"}
_DPI = 150


def write_figure(figure: "Figure", path: Path) -> None:
    """Writes a figure as PNG, PDF or SVG, as the file's name says. Raises OSError, with an errno, if it can't
    be written."""
    # Drawn in memory, since the encoders of pictures hide the system's error, such as a full disk.
    picture = BytesIO()
    figure.savefig(
        picture,
        format=path.suffix[1:],
        dpi=_DPI,
        metadata={_MAKER_KEYS[path.suffix]: MAKER},
    )
    replace_file(path.resolve(), picture.getvalue())


def is_replaceable(path: Path) -> bool:
    """Whether a picture may be written to `path`: nothing is there, or an empty file, or a picture of
    turnwise."""
    if not path.exists():
        return True
    content = path.read_bytes()
    return not content or MAKER.encode() in content
