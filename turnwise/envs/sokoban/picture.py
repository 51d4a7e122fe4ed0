"""A room of Sokoban as a picture, drawn with numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.grid import EDGE, FACE, PLAYER_COAT, PLAYER_FACE, box, disc, draw, x, y
from turnwise.envs.sokoban.room import BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET, TARGET, WALL

FLOOR_COLOR, SEAM = (226, 217, 200), (208, 197, 178)
BRICK, MORTAR = (134, 96, 82), (94, 66, 58)
SPOT = (205, 62, 56)
WOOD, BATTEN, WOOD_HOME, BATTEN_HOME = (196, 145, 76), (142, 98, 44), (112, 168, 88), (62, 112, 48)
COAT = (47, 98, 168)

_JOINTS = (np.abs(y % 0.25) < 0.04) | (np.abs((x + 0.25 * (np.floor(y * 4) % 2)) % 0.5) < 0.04)
_RING = disc(0, 0, 0.24) & ~disc(0, 0, 0.14)
_BOX = box(-0.38, -0.38, 0.38, 0.38)
_BATTENS = _BOX & (~box(-0.30, -0.30, 0.30, 0.30) | (np.minimum(np.abs(x - y), np.abs(x + y)) <= 0.06))


def draw_room(cells: Sequence[int], width: int) -> NDArray[np.uint8]:
    """A room, given as its `cell_numbers`: uint8 [TILE · rows, TILE · width, 3]. A box on a target is
    green."""
    return draw(cells, width, _paint)


def _paint(tile: NDArray[np.uint8], _: int, number: int) -> None:
    if number == WALL:
        tile[:], tile[_JOINTS] = BRICK, MORTAR
        return
    tile[:], tile[EDGE] = FLOOR_COLOR, SEAM
    if number in (TARGET, PLAYER_ON_TARGET):
        tile[_RING] = SPOT
    if number == BOX:
        tile[_BOX], tile[_BATTENS] = WOOD, BATTEN
    if number == BOX_ON_TARGET:
        tile[_BOX], tile[_BATTENS] = WOOD_HOME, BATTEN_HOME
    if number in (PLAYER, PLAYER_ON_TARGET):
        tile[PLAYER_COAT], tile[PLAYER_FACE] = COAT, FACE
