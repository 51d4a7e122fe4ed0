"""Observations of gymnasium's toy environments as text."""

from typing import Any

STOPS = "RGYB"


def taxi(observation: Any, env: Any) -> str:
    """All positions as row,column: `taxi 3,1 passenger Y 4,0 destination R 0,0` (Dietterich 2000,
    arXiv:cs/9905014)."""

    def stop(number: int) -> str:
        row, column = env.unwrapped.locs[number]
        return f"{STOPS[number]} {row},{column}"

    row, column, passenger, destination = env.unwrapped.decode(int(observation))
    rider = "in taxi"
    if passenger != len(STOPS):
        rider = stop(passenger)
    return f"taxi {row},{column} passenger {rider} destination {stop(destination)}"


def cliff_walking(observation: Any, env: Any) -> str:
    """The walker's position as row,column: `at 3,0` (Sutton and Barto 2018, example 6.6)."""
    row, column = divmod(int(observation), env.unwrapped.shape[1])
    return f"at {row},{column}"
