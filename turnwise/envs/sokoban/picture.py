"""A room of Sokoban as a picture, drawn with numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.sokoban.room import BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET, TARGET, WALL

TILE = 32
"""Pixels of a cell's side."""

FLOOR_COLOR, SEAM = (226, 217, 200), (208, 197, 178)
BRICK, MORTAR = (134, 96, 82), (94, 66, 58)
SPOT = (205, 62, 56)
WOOD, BATTEN, WOOD_HOME, BATTEN_HOME = (196, 145, 76), (142, 98, 44), (112, 168, 88), (62, 112, 48)
COAT, FACE = (47, 98, 168), (246, 214, 180)

_y: NDArray[np.float64]
_x: NDArray[np.float64]
_y, _x = np.mgrid[0:TILE, 0:TILE] / (TILE - 1) - 0.5


def _disc(x: float, y: float, radius: float) -> NDArray[np.bool_]:
    return (_x - x) ** 2 + (_y - y) ** 2 <= radius**2


def _square(half_side: float) -> NDArray[np.bool_]:
    return np.maximum(np.abs(_x), np.abs(_y)) <= half_side


_EDGE = ~_square(0.47)
_JOINTS = (np.abs(_y % 0.25) < 0.04) | (np.abs((_x + 0.25 * (np.floor(_y * 4) % 2)) % 0.5) < 0.04)
_RING = _disc(0, 0, 0.24) & ~_disc(0, 0, 0.14)
_BOX = _square(0.38)
_BATTENS = _BOX & (~_square(0.30) | (np.minimum(np.abs(_x - _y), np.abs(_x + _y)) <= 0.06))
_COAT, _FACE = _disc(0, 0.36, 0.27) & (_y <= 0.38), _disc(0, -0.06, 0.17)


def draw_room(cells: Sequence[int], width: int) -> NDArray[np.uint8]:
    """The room of `cell_numbers`, uint8 [TILE · rows, TILE · columns, 3]. A box on its target is green."""
    picture = np.empty((TILE * len(cells) // width, TILE * width, 3), np.uint8)
    for cell, number in enumerate(cells):
        row, column = divmod(cell, width)
        tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        if number == WALL:
            tile[:], tile[_JOINTS] = BRICK, MORTAR
            continue
        tile[:], tile[_EDGE] = FLOOR_COLOR, SEAM
        if number in (TARGET, PLAYER_ON_TARGET):
            tile[_RING] = SPOT
        if number == BOX:
            tile[_BOX], tile[_BATTENS] = WOOD, BATTEN
        if number == BOX_ON_TARGET:
            tile[_BOX], tile[_BATTENS] = WOOD_HOME, BATTEN_HOME
        if number in (PLAYER, PLAYER_ON_TARGET):
            tile[_COAT], tile[_FACE] = COAT, FACE
    return picture
