"""GIFs are real animations with every frame, and a caption says honestly what it left out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from turnwise.report.gif import MAX_LINES, PICTURE_SIDE, Frame, caption_lines, write_gif

PICTURE = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)


def frame(picture=PICTURE, title="turn 1", **caption):
    return Frame(picture, title, tuple(caption.items()))


def pixels(path):
    with Image.open(path) as image:
        assert image.format == "GIF" and image.is_animated
        sizes = []
        for index in range(image.n_frames):
            image.seek(index)
            sizes.append(np.asarray(image.convert("RGB")))
    return sizes


def test_every_frame_is_in_the_file_even_where_only_the_text_differs(tmp_path):
    frames = [frame(title=f"turn {number}", said="the same") for number in range(5)]
    images = pixels(write_gif(tmp_path / "a.gif", frames))
    assert len(images) == 5
    assert all(not np.array_equal(a, b) for a, b in pairwise(images))


def test_the_picture_is_enlarged_by_whole_pixels(tmp_path):
    red = np.full((8, 12, 3), (200, 0, 0), np.uint8)
    image = pixels(write_gif(tmp_path / "a.gif", [frame(red), frame(red, title="turn 2")]))[0]
    rows, columns = np.nonzero((image == (200, 0, 0)).all(axis=-1))
    factor = PICTURE_SIDE // 12
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (8 * factor, 12 * factor)


@pytest.mark.parametrize(
    "picture", ["a text\nin place of a picture", np.zeros((900, 1200, 3), np.uint8), "", PICTURE]
)
def test_pictures_of_any_size_and_texts_make_frames_of_one_size(picture, tmp_path):
    images = pixels(write_gif(tmp_path / "a.gif", [frame(picture), frame("x", said="y " * 400), frame()]))
    assert len({image.shape for image in images}) == 1


def test_texts_are_wrapped_and_what_is_left_out_is_counted():
    text = "word " * 400
    lines = [line[8:] for line in caption_lines(frame(said=text))[2:]]
    assert len(lines) == MAX_LINES
    shown = "".join(lines[:-1])
    assert text.startswith(shown)
    assert lines[-1] == f"… {len(text) - len(shown):,} more characters"


def test_lines_of_a_grid_stay_lines():
    assert caption_lines(frame(saw="P _ _\n_ O G"))[2:] == ["saw     P _ _", "        _ O G"]


def test_control_characters_are_written_out():
    [line] = caption_lines(frame(said="│√│ é\x1b\t."))[2:]
    assert line.startswith(r"said    │√│ é\x1b") and line.endswith(".") and line.isprintable()
