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

from turnwise.runtime.console import printable

PICTURE_SIDE = 320
"""Maximum pixels of a picture's longer side: smaller pictures are enlarged by a whole factor, larger ones
shrunk."""
FRAME_MS = 900
LAST_FRAME_MS = 2500
MAX_LINES = 9
"""Maximum lines of one text. If a text is longer, its last line tells how many characters are left out."""

_COLUMNS = 46
_LABEL_COLUMNS = 8
_TEXT_SIZE = 13
_LINE_HEIGHT = 18
_MARGIN = 16
_INK = (34, 40, 49)
_PAPER = (255, 255, 255)
_TEXT_PAPER = (240, 243, 246)


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
    picture_width = max(picture.width for picture in pictures)
    picture_height = max(picture.height for picture in pictures)
    caption_height = max(map(len, captions)) * _LINE_HEIGHT
    caption_width = round((_LABEL_COLUMNS + _COLUMNS) * _font().getlength("x"))
    height = max(picture_height, caption_height) + 2 * _MARGIN
    width = picture_width + caption_width + 3 * _MARGIN
    images = []
    for picture, lines in zip(pictures, captions, strict=True):
        image = Image.new("RGB", (width, height), _PAPER)
        image.paste(picture, (_MARGIN, _MARGIN))
        _draw_lines(image, picture_width + 2 * _MARGIN, lines)
        image = image.quantize(
            128,
            method=Image.Quantize.FASTOCTREE,
            dither=Image.Dither.NONE,
        )
        images.append(image)
    times = [FRAME_MS] * len(images)
    times[-1] = LAST_FRAME_MS
    # Encoded in memory, since the encoder hides the system's error, such as a full disk.
    animation = BytesIO()
    images[0].save(
        animation,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=times,
        loop=0,
    )
    path.write_bytes(animation.getvalue())
    return path


def caption_lines(frame: Frame) -> list[str]:
    """The lines beside a frame's picture: the title, then each text of the caption, wrapped, after its
    label."""
    lines = _wrapped(frame.title, _COLUMNS + _LABEL_COLUMNS)
    for label, text in frame.caption:
        lines.append("")
        for line in _wrapped(text, _COLUMNS):
            lines.append(f"{label:<{_LABEL_COLUMNS}}{line}")
            label = ""
    return lines


def _wrapped(text: str, columns: int) -> list[str]:
    """At most `MAX_LINES` lines of at most `columns` characters. Unprintable characters are escaped, such as
    `\\x1b`."""
    lines: list[str] = []
    for line in printable(text.expandtabs(4)).splitlines():
        wrapped = textwrap.wrap(
            line,
            columns,
            drop_whitespace=False,
            replace_whitespace=False,
        )
        lines += wrapped or [""]
    if len(lines) > MAX_LINES:
        num_hidden = sum(map(len, lines[MAX_LINES - 1 :]))
        lines[MAX_LINES - 1 :] = [f"… {num_hidden:,} more characters"]
    return lines or [""]


def _draw_picture(picture: NDArray[np.uint8] | str) -> Image.Image:
    if isinstance(picture, str):
        lines = _wrapped(picture, _COLUMNS)
        text_width = round(max(map(_font().getlength, lines)))
        width = max(PICTURE_SIDE // 2, text_width + 2 * _MARGIN)
        height = len(lines) * _LINE_HEIGHT + 2 * _MARGIN
        image = Image.new("RGB", (width, height), _TEXT_PAPER)
        _draw_lines(image, _MARGIN, lines)
        return image
    image = Image.fromarray(np.ascontiguousarray(picture))
    longer = max(image.size)
    if longer > PICTURE_SIDE:
        image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        return image
    factor = PICTURE_SIDE // longer
    size = (image.width * factor, image.height * factor)
    return image.resize(size, Image.Resampling.NEAREST)


def _draw_lines(
    image: Image.Image,
    x: int,
    lines: Sequence[str],
) -> None:
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        y = _MARGIN + row * _LINE_HEIGHT
        draw.text((x, y), line, _INK, _font())


@lru_cache
def _font() -> Any:
    """DejaVu Sans Mono, which comes with matplotlib. It is monospaced and has box characters, Greek and
    Cyrillic."""
    import matplotlib

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")
    return ImageFont.truetype(str(file), _TEXT_SIZE)
