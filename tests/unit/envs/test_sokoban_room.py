"""Rooms of Sokoban: every one can be solved, they differ, and training's are kept apart from validation's."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import pytest
from messages import says

from turnwise.envs.hold_out import in_split
from turnwise.envs.sokoban.env import SokobanEnv
from turnwise.envs.sokoban.room import (
    Layout,
    State,
    cell_numbers,
    inner_walls,
    layout_hash,
    move,
    random_room,
    read_room,
)
from turnwise.envs.sokoban.solver import live_cells, shortest_solution
from turnwise.errors import EnvironmentFault

Place = tuple[int, int]


def fewest_actions(grid: str) -> int | None:
    """The length of a shortest solution, by A* on the observation with rules written again; None if there is
    none.

    The lower bound is the sum of the boxes' distances to their nearest targets, which a step shortens by one
    at most.
    """
    places: dict[str, set[Place]] = {symbol: set() for symbol in "#_O√XPS"}
    for row, line in enumerate(grid.splitlines()):
        for column, symbol in enumerate(line.split()):
            places[symbol].add((row, column))
    walls, targets = places["#"], places["O"] | places["√"] | places["S"]
    [player] = places["P"] | places["S"]
    boxes = frozenset(places["X"] | places["√"])

    def bound(boxes: frozenset[Place]) -> int:
        return sum(min(abs(r - y) + abs(c - x) for y, x in targets) for r, c in boxes)

    counter = itertools.count()
    queue = [(bound(boxes), next(counter), 0, player, boxes)]
    seen = {(player, boxes)}
    while queue:
        _, _, num_actions, (row, column), boxes = heapq.heappop(queue)
        if boxes == targets:
            return num_actions
        for down, right in ((1, 0), (0, 1), (-1, 0), (0, -1)):
            ahead, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if ahead in walls or (ahead in boxes and (beyond in walls or beyond in boxes)):
                continue
            after = (boxes - {ahead}) | {beyond} if ahead in boxes else boxes
            if (ahead, after) not in seen:
                seen.add((ahead, after))
                heapq.heappush(
                    queue, (num_actions + 1 + bound(after), next(counter), num_actions + 1, ahead, after)
                )
    return None


def shown(layout: Layout, state: State) -> str:
    symbols = ["#_O√XPS"[number] for number in cell_numbers(layout, state)]
    return "\n".join(" ".join(symbols[i : i + layout.width]) for i in range(0, len(symbols), layout.width))


@pytest.mark.parametrize(
    ("dim_room", "num_boxes", "search_depth", "num_rooms"),
    [
        ((6, 6), 1, 300, 200),
        ((6, 6), 1, 10, 50),
        ((5, 7), 1, 300, 50),
        ((3, 8), 1, 300, 20),
        ((6, 6), 2, 300, 100),
        ((7, 7), 2, 300, 50),
        ((7, 7), 3, 50, 30),
        ((10, 10), 1, 300, 50),
        ((8, 8), 2, 300, 20),
    ],
)
def test_every_room_can_be_solved_and_is_not_yet(
    dim_room: tuple[int, int], num_boxes: int, search_depth: int, num_rooms: int
) -> None:
    for seed in range(num_rooms):
        layout, start = random_room(seed, dim_room, num_boxes, search_depth)
        assert (layout.height, layout.width) == dim_room
        assert len(start.boxes) == len(layout.targets) == num_boxes
        assert start.boxes.isdisjoint(layout.targets | layout.walls)
        assert start.player not in layout.walls | start.boxes
        grid = shown(layout, start)
        lines = grid.splitlines()
        assert set(lines[0] + lines[-1] + "".join(line[0] + line[-1] for line in lines)) <= {"#", " "}
        solution = shortest_solution(layout, start)
        assert solution is not None
        assert fewest_actions(grid) == len(solution) > 0


def test_the_two_solvers_agree_on_rooms_without_a_solution() -> None:
    num_lost = 0
    for seed in range(60):
        layout, start = random_room(seed)
        for cell in range(36):
            if cell not in layout.walls | {start.player}:
                state = State(start.player, frozenset({cell}))
                solution = shortest_solution(layout, state)
                assert fewest_actions(shown(layout, state)) == (None if solution is None else len(solution))
                num_lost += solution is None
    assert num_lost > 100


def test_a_solution_is_the_first_in_order_among_the_shortest() -> None:
    room = read_room(["######", "#@   #", "#  $ #", "#   .#", "######"])
    layout, start = room
    solution = shortest_solution(*room)
    assert solution is not None

    def solves(actions: tuple[int, ...]) -> bool:
        state = start
        for action in actions:
            state = move(layout, state, action)
        return state.boxes == layout.targets

    shortest = [actions for actions in itertools.product(range(4), repeat=len(solution)) if solves(actions)]
    assert min(shortest) == tuple(solution)
    assert not any(solves(actions) for actions in itertools.product(range(4), repeat=len(solution) - 1))


def test_the_solver_gives_up_where_it_is_told_to() -> None:
    room = random_room(0, (8, 8), 2)
    assert shortest_solution(*room) is not None
    assert shortest_solution(*room, max_states=10) is None


def test_boxes_are_lost_in_corners_and_along_walls_without_a_target() -> None:
    layout, _ = read_room(["######", "#@   #", "# $  #", "#   .#", "######"])
    assert {divmod(cell, 6) for cell in live_cells(layout)} == {
        (2, 2),
        (2, 3),
        (3, 2),
        (3, 3),
        (3, 4),
        (2, 4),
    }


def test_a_room_follows_from_its_arguments() -> None:
    # A seed must go on drawing the same room in every process, since published figures are measured on these
    # rooms.
    letters = "".join("# .*$@+"[number] for number in cell_numbers(*random_room(0)))
    assert [letters[i : i + 6] for i in range(0, 36, 6)] == [
        "######",
        "#@   #",
        "#   ##",
        "# $ .#",
        "#  ###",
        "######",
    ]
    assert [random_room(seed, (7, 6), 2)[1].player for seed in range(6)] == [28, 16, 14, 8, 19, 16]
    assert layout_hash(random_room(3)[0]) == 14973262559747290116
    for arguments in ((0, (6, 6), 1, 300, "val"), (5, (9, 8), 3, 120, "train")):
        assert random_room(*arguments) == random_room(*arguments)  # type: ignore[arg-type]
    assert len({random_room(seed) for seed in range(50)}) > 45


def test_rooms_of_the_two_splits_share_no_walls_and_targets() -> None:
    layouts = {
        split: {random_room(seed, split=split)[0] for seed in range(300)} for split in ("train", "val")
    }  # type: ignore[arg-type]
    assert layouts["train"].isdisjoint(layouts["val"])
    hashes = [layout_hash(layout) for layout in layouts["train"]]
    assert all(in_split(content, "train") and not in_split(content, "val") for content in hashes)
    share = sum(in_split(layout_hash(random_room(seed)[0]), "val") for seed in range(500)) / 500
    assert share == pytest.approx(0.25, abs=0.05)


def test_the_split_is_of_what_no_move_changes() -> None:
    layout, start = read_room(["#####", "#@  #", "# $.#", "#####"])
    other_start = read_room(["#####", "#  @#", "# $.#", "#####"])[0]
    other_target = read_room(["#####", "#@  #", "#.$ #", "#####"])[0]
    turned = read_room(["####", "#@ #", "# $#", "# .#", "####"])[0]
    assert layout_hash(layout) == layout_hash(other_start)
    assert len({layout_hash(one) for one in (layout, other_target, turned)}) == 3
    assert start.player == 6


def test_rooms_are_many_and_few_of_them_trivial() -> None:
    rooms = [random_room(seed) for seed in range(1000)]
    lengths = sorted(len(shortest_solution(*room) or []) for room in rooms)
    assert len(set(rooms)) > 950 and len({layout for layout, _ in rooms}) > 850
    assert sum(length <= 2 for length in lengths) < 180
    assert lengths[500] >= 5 and lengths[950] >= 10
    assert len({len(layout.walls) for layout, _ in rooms}) == 7


def test_a_longer_backward_game_makes_longer_solutions() -> None:
    means = []
    for depth in (5, 30, 300):
        means.append(
            sum(len(shortest_solution(*random_room(seed, search_depth=depth)) or []) for seed in range(200))
            / 200
        )
    assert means[0] + 1 < means[1] < means[2] - 1
    assert means[0] <= 5


def test_letters_are_read_and_written() -> None:
    rows = ["#######", "#@$.# #", "#*  $.#", "#######"]
    layout, state = read_room(rows)
    assert (layout.targets, state) == (frozenset({10, 15, 19}), State(8, frozenset({9, 15, 18})))
    assert inner_walls(layout) == {11}
    letters = "".join("# .*$@+"[number] for number in cell_numbers(layout, state))
    assert [letters[i : i + 7] for i in range(0, 28, 7)] == rows
    on_target = read_room(["#####", "#+$ #", "#####"])
    assert "+" in ["# .*$@+"[number] for number in cell_numbers(*on_target)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], says("room_rows", "equal length")),
        (["####", "#@.$#", "####"], says("room_rows", "equal length")),
        (["#####", "#@$x#", "#####"], "of the letters '# .*\\$@\\+'"),
        (["#####", "#@$. ", "#####"], "walls .* all around"),
        (["#####", "# $.#", "#####"], says("0 players", "1 boxes", "1 targets")),
        (["######", "#@$$.#", "######"], says("1 players", "2 boxes", "1 targets")),
        (["#####", "#@  #", "#####"], "at least one"),
        (["#####", "#@ *#", "#####"], "solved already"),
        ("#####", says("room_rows", "list of strings")),
        ([5, 6], says("room_rows", "list of strings")),
    ],
)
def test_what_is_no_room_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        SokobanEnv(room_rows=rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim_room": (3, 3)}, says("3×3", "1 boxes", "raise dim_room")),
        ({"dim_room": (4, 4), "num_boxes": 3}, says("4×4", "3 boxes")),
    ],
)
def test_arguments_that_yield_no_room_are_refused(arguments: dict[str, object], message: str) -> None:
    env = SokobanEnv(**arguments)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFault, match=message):
        env.reset(seed=0)
