"""Animated pictures of episodes: each frame with the observation, the answer and the action."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

PICTURE_SIDE = 320
"""Pixels of a picture's longer side: smaller ones are enlarged by whole numbers, larger ones shrunk."""
FRAME_MS, LAST_FRAME_MS = 900, 2500
MAX_LINES = 9
"""Most lines of one text of a caption; further lines are counted."""

_COLUMNS = 46
_TEXT_SIZE, _LINE_HEIGHT, _MARGIN, _LABEL_WIDTH = 13, 18, 16, 64
_INK, _LABEL, _PAPER, _BOX = (34, 40, 49), (120, 130, 140), (255, 255, 255), (240, 243, 246)


@dataclass(frozen=True, slots=True)
class Frame:
    """One image of an animation: a picture, uint8 [H, W, 3], or a text in its place, and the caption beside it."""

    picture: NDArray[np.uint8] | str
    title: str
    caption: Sequence[tuple[str, str]]
    """`(label, text)` from top to bottom."""


def write_gif(path: Path, frames: Sequence[Frame]) -> Path:
    """Writes the frames as an endless animation, all of one size."""
    pictures = [_draw_picture(frame.picture) for frame in frames]
    captions = [caption_lines(frame) for frame in frames]
    box = (max(p.width for p in pictures), max(p.height for p in pictures))
    height = max(box[1], max(map(len, captions)) * _LINE_HEIGHT) + 2 * _MARGIN
    width = box[0] + _LABEL_WIDTH + round(_COLUMNS * _font().getlength("x")) + 3 * _MARGIN
    images = []
    for picture, lines in zip(pictures, captions, strict=True):
        image = Image.new("RGB", (width, height), _PAPER)
        image.paste(picture, (_MARGIN, _MARGIN))
        _draw_caption(ImageDraw.Draw(image), box[0] + 2 * _MARGIN, lines)
        images.append(image.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))
    times = [FRAME_MS] * (len(images) - 1) + [LAST_FRAME_MS]
    images[0].save(path, save_all=True, append_images=images[1:], duration=times, loop=0)
    return path


def caption_lines(frame: Frame) -> list[tuple[str, str]]:
    """`(label, line)` as they are drawn: the title, and each text wrapped behind its label."""
    lines = [("", line) for line in _wrapped(frame.title, _COLUMNS + _LABEL_WIDTH // 8)]
    for label, text in frame.caption:
        lines.append(("", ""))
        lines += [(label if number == 0 else "", line) for number, line in enumerate(_wrapped(text, _COLUMNS))]
    return lines


def drawable(text: str) -> str:
    """The text with every character that the font lacks written out.

    >>> drawable("√ ok \\U0001f642")
    '√ ok \\\\U0001f642'
    """
    known = _known_characters()
    return "".join(c if c == "\n" or ord(c) in known else ascii(c)[1:-1] for c in text.expandtabs(4))


def _wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` characters; what goes beyond `MAX_LINES` is counted in the last one."""
    lines: list[str] = []
    for line in drawable(text).splitlines():
        lines += textwrap.wrap(line, columns, drop_whitespace=False, replace_whitespace=False) or [""]
    if len(lines) > MAX_LINES:
        left_out = sum(map(len, lines[MAX_LINES - 1 :]))
        lines = [*lines[: MAX_LINES - 1], f"… {left_out:,} more characters"]
    return lines or [""]


def _draw_picture(picture: NDArray[np.uint8] | str) -> Image.Image:
    if isinstance(picture, str):
        return _draw_text(picture)
    image = Image.fromarray(np.ascontiguousarray(picture))
    longer = max(image.size)
    if longer > PICTURE_SIDE:
        image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        return image
    factor = PICTURE_SIDE // longer
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _draw_text(text: str) -> Image.Image:
    """A text on paper of its own, as wide as its lines ask for."""
    lines = _wrapped(text, _COLUMNS)
    font = _font()
    width = max(PICTURE_SIDE // 2, round(max(font.getlength(line) for line in lines)) + 2 * _MARGIN)
    image = Image.new("RGB", (width, len(lines) * _LINE_HEIGHT + 2 * _MARGIN), _BOX)
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + row * _LINE_HEIGHT), line, _INK, font)
    return image


def _draw_caption(draw: ImageDraw.ImageDraw, left: int, lines: Sequence[tuple[str, str]]) -> None:
    font, is_title = _font(), True
    for row, (label, line) in enumerate(lines):
        top = _MARGIN + row * _LINE_HEIGHT
        is_title = is_title and bool(line)
        draw.text((left, top), label, _LABEL, font)
        draw.text((left if is_title else left + _LABEL_WIDTH, top), line, _INK, font)


@lru_cache
def _font() -> Any:
    return ImageFont.truetype(str(_font_file()), _TEXT_SIZE)


@lru_cache
def _known_characters() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_font_file())).get_charmap())


def _font_file() -> Path:
    """DejaVu Sans Mono, which comes with matplotlib: even columns, box characters, Greek and Cyrillic."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
