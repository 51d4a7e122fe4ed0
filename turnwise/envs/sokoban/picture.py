"""A room of Sokoban as a picture, drawn with numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.grid import EDGE, FACE, PLAYER_COAT, PLAYER_FACE, box, disc, draw, x, y
from turnwise.envs.sokoban.room import BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET, TARGET, WALL

FLOOR_COLOR = (226, 217, 200)
SEAM = (208, 197, 178)
BRICK = (134, 96, 82)
MORTAR = (94, 66, 58)
SPOT = (205, 62, 56)
WOOD = (196, 145, 76)
BATTEN = (142, 98, 44)
WOOD_HOME = (112, 168, 88)
BATTEN_HOME = (62, 112, 48)
COAT = (47, 98, 168)

_ROW_OFFSET = 0.25 * (np.floor(y * 4) % 2)
_JOINTS = (np.abs(y % 0.25) < 0.04) | (np.abs((x + _ROW_OFFSET) % 0.5) < 0.04)
_RING = disc(0, 0, 0.24) & ~disc(0, 0, 0.14)
_BOX = box(-0.38, -0.38, 0.38, 0.38)
_DIAGONALS = np.minimum(np.abs(x - y), np.abs(x + y)) <= 0.06
_BATTENS = _BOX & (~box(-0.30, -0.30, 0.30, 0.30) | _DIAGONALS)


def draw_room(cells: Sequence[int], width: int) -> NDArray[np.uint8]:
    """A room, given as its `cell_numbers`: uint8 [TILE · rows, TILE · width, 3]. A box on a target is
    green."""
    return draw(cells, width, _paint)


def _paint(tile: NDArray[np.uint8], _: int, number: int) -> None:
    if number == WALL:
        tile[:] = BRICK
        tile[_JOINTS] = MORTAR
        return
    tile[:] = FLOOR_COLOR
    tile[EDGE] = SEAM
    if number in (TARGET, PLAYER_ON_TARGET):
        tile[_RING] = SPOT
    if number == BOX:
        tile[_BOX] = WOOD
        tile[_BATTENS] = BATTEN
    if number == BOX_ON_TARGET:
        tile[_BOX] = WOOD_HOME
        tile[_BATTENS] = BATTEN_HOME
    if number in (PLAYER, PLAYER_ON_TARGET):
        tile[PLAYER_COAT] = COAT
        tile[PLAYER_FACE] = FACE
