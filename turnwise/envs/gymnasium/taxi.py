"""Gymnasium's Taxi in words (Dietterich 2000, arXiv:cs/9905014)."""

from typing import Any

ACTIONS = ("south", "north", "east", "west", "pickup", "dropoff")

RULES = """\
You drive a taxi. Fetch the passenger, drive to the destination and drop them off there.
A place is row,column, counted from 0 at the top left. | is a wall between columns, : is open. R, G, Y, B are stops:
|R: | : :G|
| : | : : |
| : : : : |
| | : | : |
|Y| : |B: |"""

STOPS = "RGYB"


def words(observation: Any, env: Any) -> str:
    """The places of taxi, passenger and destination: `taxi 3,1 passenger Y 4,0 destination R 0,0`."""
    row, column, passenger, destination = env.unwrapped.decode(int(observation))
    riding = passenger == len(STOPS)
    return (
        f"taxi {row},{column} passenger {'in taxi' if riding else _stop(passenger, env)} destination {_stop(destination, env)}"
    )


def _stop(number: int, env: Any) -> str:
    row, column = env.unwrapped.locs[number]
    return f"{STOPS[number]} {row},{column}"
