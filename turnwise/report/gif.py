"""Animated pictures of episodes: each frame with the observation, the answer and the action."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

PICTURE_SIDE = 320
"""Maximum pixels of a picture's longer side: smaller pictures are enlarged by a whole factor, larger ones
shrunk."""
FRAME_MS, LAST_FRAME_MS = 900, 2500
MAX_LINES = 9
"""Maximum lines of one text. If a text is longer, its last line tells how many characters are left out."""

_COLUMNS, _LABEL_COLUMNS = 46, 8
_TEXT_SIZE, _LINE_HEIGHT, _MARGIN = 13, 18, 16
_INK, _PAPER = (34, 40, 49), (255, 255, 255)


@dataclass(frozen=True, slots=True)
class Frame:
    """One image of an animation: a picture (uint8 [H, W, 3]) or a text in its place, and beside it a title
    and a caption."""

    picture: NDArray[np.uint8] | str
    title: str
    caption: Sequence[tuple[str, str]]
    """`(label, text)` from top to bottom."""


def write_gif(path: Path, frames: Sequence[Frame]) -> Path:
    """Writes the frames as a GIF that repeats forever, and returns `path`."""
    pictures = [_draw_picture(frame.picture) for frame in frames]
    captions = [caption_lines(frame) for frame in frames]
    box = (max(p.width for p in pictures), max(p.height for p in pictures))
    height = max(box[1], max(map(len, captions)) * _LINE_HEIGHT) + 2 * _MARGIN
    width = box[0] + round((_LABEL_COLUMNS + _COLUMNS) * _font().getlength("x")) + 3 * _MARGIN
    images = []
    for picture, lines in zip(pictures, captions, strict=True):
        image = Image.new("RGB", (width, height), _PAPER)
        image.paste(picture, (_MARGIN, _MARGIN))
        _draw_lines(image, box[0] + 2 * _MARGIN, lines)
        images.append(image.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))
    times = [FRAME_MS] * (len(images) - 1) + [LAST_FRAME_MS]
    # Encoded in memory, since the encoder hides the system's error, such as a full disk.
    animation = BytesIO()
    images[0].save(animation, format="GIF", save_all=True, append_images=images[1:], duration=times, loop=0)
    path.write_bytes(animation.getvalue())
    return path


def caption_lines(frame: Frame) -> list[str]:
    """The lines beside a frame's picture: the title, then each text of the caption, wrapped, after its
    label."""
    lines = _wrapped(frame.title, _COLUMNS + _LABEL_COLUMNS)
    for label, text in frame.caption:
        first, *rest = _wrapped(text, _COLUMNS)
        lines += ["", f"{label:<{_LABEL_COLUMNS}}{first}", *(" " * _LABEL_COLUMNS + line for line in rest)]
    return lines


def _wrapped(text: str, columns: int) -> list[str]:
    """At most `MAX_LINES` lines of at most `columns` characters. Unprintable characters are escaped, such as
    `\\x1b`."""
    printable = "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text.expandtabs(4))
    lines: list[str] = []
    for line in printable.splitlines():
        lines += textwrap.wrap(line, columns, drop_whitespace=False, replace_whitespace=False) or [""]
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"… {sum(map(len, lines[MAX_LINES - 1 :])):,} more characters"]
    return lines or [""]


def _draw_picture(picture: NDArray[np.uint8] | str) -> Image.Image:
    if isinstance(picture, str):
        lines = _wrapped(picture, _COLUMNS)
        width = max(PICTURE_SIDE // 2, round(max(map(_font().getlength, lines))) + 2 * _MARGIN)
        image = Image.new("RGB", (width, len(lines) * _LINE_HEIGHT + 2 * _MARGIN), (240, 243, 246))
        _draw_lines(image, _MARGIN, lines)
        return image
    image = Image.fromarray(np.ascontiguousarray(picture))
    longer = max(image.size)
    if longer > PICTURE_SIDE:
        image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        return image
    factor = PICTURE_SIDE // longer
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _draw_lines(image: Image.Image, left: int, lines: Sequence[str]) -> None:
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        draw.text((left, _MARGIN + row * _LINE_HEIGHT), line, _INK, _font())


@lru_cache
def _font() -> Any:
    """DejaVu Sans Mono, which comes with matplotlib. It is monospaced and has box characters, Greek and
    Cyrillic."""
    import matplotlib

    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"), _TEXT_SIZE
    )
