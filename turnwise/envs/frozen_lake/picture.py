"""The frozen lake as a picture, drawn with numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TILE = 32
"""Pixels of a cell's side."""

ICE, CRACK = (214, 234, 248), (174, 208, 230)
WATER, DEEP_WATER = (52, 105, 158), (28, 66, 112)
POLE, FLAG = (94, 74, 56), (39, 158, 84)
COAT, FACE = (205, 62, 56), (246, 214, 180)

_y: NDArray[np.float64]
_x: NDArray[np.float64]
_y, _x = np.mgrid[0:TILE, 0:TILE] / (TILE - 1) - 0.5


def _disc(x: float, y: float, radius: float) -> NDArray[np.bool_]:
    return (_x - x) ** 2 + (_y - y) ** 2 <= radius**2


def _box(left: float, top: float, right: float, bottom: float) -> NDArray[np.bool_]:
    return (_x >= left) & (_x <= right) & (_y >= top) & (_y <= bottom)


_EDGE = ~_box(-0.47, -0.47, 0.47, 0.47)
_HOLE, _DEPTH = _disc(0, 0, 0.40), _disc(0.02, 0.05, 0.32)
_POLE, _FLAG = _box(-0.24, -0.36, -0.17, 0.38), (_x >= -0.17) & (np.abs(_y + 0.19) <= 0.17 * (0.34 - _x) / 0.51)
_COAT, _FACE = _disc(0, 0.36, 0.27) & (_y <= 0.38), _disc(0, -0.06, 0.17)
_CROSS = _disc(0, 0, 0.34) & (np.minimum(np.abs(_x - _y), np.abs(_x + _y)) <= 0.09)


def draw_lake(rows: Sequence[str], position: int) -> NDArray[np.uint8]:
    """The map with the player at `position`, uint8 [TILE · rows, TILE · columns, 3]. A cross marks a player in a hole."""
    width = len(rows[0])
    picture = np.empty((TILE * len(rows), TILE * width, 3), np.uint8)
    for index, letter in enumerate("".join(rows)):
        row, column = divmod(index, width)
        tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        tile[:] = ICE
        tile[_EDGE] = CRACK
        if letter == "H":
            tile[_HOLE], tile[_DEPTH] = WATER, DEEP_WATER
        elif letter == "G":
            tile[_POLE], tile[_FLAG] = POLE, FLAG
        if index == position:
            if letter == "H":
                tile[_CROSS] = COAT
            else:
                tile[_COAT], tile[_FACE] = COAT, FACE
    return picture
