"""The shortest solution of a Sokoban room."""

from collections.abc import Iterator
from functools import lru_cache

from turnwise.envs.grid import fewest_actions
from turnwise.envs.sokoban.room import Layout, State, move

MAX_STATES = 200_000
"""Maximum states searched. Searching them takes about a second. An 8×8 room with two boxes has fewer."""


def shortest_solution(
    layout: Layout,
    state: State,
    max_states: int = MAX_STATES,
) -> list[int] | None:
    """The shortest list of actions that brings every box onto a target; among equals, the lexicographically
    first. None if no solution is found within `max_states` states.

    >>> from turnwise.envs.sokoban.room import read_room
    >>> shortest_solution(*read_room(["######", "#@$ .#", "######"]))
    [3, 3]
    """
    live = live_cells(layout)
    if not state.boxes <= live:
        return None

    def moves(here: State) -> Iterator[State]:
        for action in range(4):
            there = move(layout, here, action)
            yield there if there.boxes <= live else here

    return fewest_actions(state, lambda here: here.boxes == layout.targets, moves, max_states)


@lru_cache(maxsize=256)
def live_cells(layout: Layout) -> frozenset[int]:
    """The cells from which a box, alone in the room, can be pushed onto some target by a player who can get
    behind it from any side. From all other cells no box can reach a target.

    >>> from turnwise.envs.sokoban.room import read_room
    >>> sorted(live_cells(read_room(["######", "#@$ .#", "######"])[0]))
    [8, 9, 10]
    """
    live = set(layout.targets)
    queue = list(live)
    while queue:
        cell = queue.pop()
        for step in layout.steps:
            box = cell - step
            player = box - step
            if box not in live and box not in layout.walls and player not in layout.walls:
                live.add(box)
                queue.append(box)
    return frozenset(live)
