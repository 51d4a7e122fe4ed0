"""Gymnasium's CliffWalking in words (Sutton and Barto 2018, example 6.6)."""

from typing import Any

ACTIONS = ("up", "right", "down", "left")

RULES = """\
Walk from the bottom left corner of a grid, 3,0, to the bottom right one, 3,11, in few steps. A place is row,column, counted
from 0 at the top left; there are 4 rows and 12 columns. Between the two corners, from 3,1 to 3,10, is a cliff: who steps on it
starts again."""


def words(observation: Any, env: Any) -> str:
    """The walker's place: `at 3,0`."""
    row, column = divmod(int(observation), env.unwrapped.shape[1])
    return f"at {row},{column}"
