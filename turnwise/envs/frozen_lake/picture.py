"""The frozen lake as a picture, drawn with numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.grid import EDGE, FACE, PLAYER_COAT, PLAYER_FACE, box, disc, draw, x, y

ICE = (214, 234, 248)
CRACK = (174, 208, 230)
WATER = (52, 105, 158)
DEEP_WATER = (28, 66, 112)
POLE = (94, 74, 56)
FLAG = (39, 158, 84)
COAT = (205, 62, 56)

_HOLE = disc(0, 0, 0.40)
_DEPTH = disc(0.02, 0.05, 0.32)
_POLE = box(-0.24, -0.36, -0.17, 0.38)
_FLAG = (x >= -0.17) & (np.abs(y + 0.19) <= 0.17 * (0.34 - x) / 0.51)
_CROSS = disc(0, 0, 0.34) & (np.minimum(np.abs(x - y), np.abs(x + y)) <= 0.09)


def draw_lake(rows: Sequence[str], position: int) -> NDArray[np.uint8]:
    """The map with the player at `position`, uint8 [TILE · rows, TILE · columns, 3]. A cross marks a player
    in a hole."""

    def paint(tile: NDArray[np.uint8], index: int, letter: str) -> None:
        tile[:] = ICE
        tile[EDGE] = CRACK
        if letter == "H":
            tile[_HOLE] = WATER
            tile[_DEPTH] = DEEP_WATER
        elif letter == "G":
            tile[_POLE] = POLE
            tile[_FLAG] = FLAG
        if index == position and letter == "H":
            tile[_CROSS] = COAT
        elif index == position:
            tile[PLAYER_COAT] = COAT
            tile[PLAYER_FACE] = FACE

    return draw("".join(rows), len(rows[0]), paint)
