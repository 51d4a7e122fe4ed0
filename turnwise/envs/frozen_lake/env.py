"""FrozenLake: walk over the ice to the goal and don't fall into a hole. The dynamics are those of gymnasium's
FrozenLake-v1 (Towers et al. 2024, arXiv:2407.17032), written again: a step takes microseconds, and gymnasium
isn't needed."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.arguments import check_type
from turnwise.envs.base import Step, episode_seed
from turnwise.envs.frozen_lake.map import (
    Map,
    check_map_arguments,
    map_hash,
    random_map,
    read_map,
    shortest_path,
)
from turnwise.envs.frozen_lake.picture import draw_lake
from turnwise.envs.grid import GridEnv, ObservationKind as ObservationKind, RenderMode, neighbours
from turnwise.errors import EnvironmentFault
from turnwise.types import Observation, Split, derive_seed

GRID_VOCAB = MappingProxyType(
    {
        "P": "player",
        "_": "ice",
        "O": "hole",
        "G": "goal",
        "X": "player in a hole",
        "√": "player on the goal",
    }
)


class FrozenLakeEnv(GridEnv):
    """A lake of `size` × `size` cells, drawn from the seed. The step that reaches the goal has reward 1, any
    other valid step 0. Raises EnvironmentFault if an argument is out of range.

    An action that isn't one of the four words (case doesn't matter) moves nothing and costs `format_penalty`
    (≤ 0); the episode continues. The environment has no step limit of its own; the agent has `max_steps`.

    Args:
        size: cells of a side, at least 2.
        p: probability that a cell is ice and not a hole, in (0, 1]. A map without a way to the goal is drawn
            again.
        is_slippery: a step goes in the chosen direction, to its left or to its right, with probability 1/3
            each.
        render_mode: what is observed, `text` or a picture (`rgb_array`). `render()` draws in both modes.
        observation: the form of the text: a `grid` of symbols, `coordinates` (`P0,0 G3,3 O1,2`), or `both`.
        format_penalty: reward of an invalid action.
        split: `train` or `val`: draws only maps whose *content* belongs to this split. None: draws from all
            maps.
        map_rows: one fixed map of the letters S, F, H, G, in place of `size`, `p` and `split`.
        grid_vocab: symbol → meaning, in the order of `GRID_VOCAB`.
        action_lookup: gymnasium's number → word, for each of 0 left, 1 down, 2 right, 3 up.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.

    >>> lake = FrozenLakeEnv(map_rows=["SF", "HG"], is_slippery=False)
    >>> print(lake.reset(seed=0)[0])
    P _
    O G
    >>> lake.step("right")[:2], lake.step("Down")[:3]
    (('_ P\\nO G', 0.0), ('_ _\\nO √', 1.0, True))
    """

    name = "FrozenLake"
    scene = "lake"
    words = MappingProxyType({0: "Left", 1: "Down", 2: "Right", 3: "Up"})

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        render_mode: RenderMode = "text",
        observation: ObservationKind = "grid",
        format_penalty: float = 0.0,
        split: Split | None = None,
        map_rows: Sequence[str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        super().__init__(render_mode, observation, format_penalty, split, action_lookup)
        check_map_arguments(size, p)
        check_type("FrozenLake", "is_slippery", is_slippery, bool, "true or false")
        if grid_vocab is None:
            grid_vocab = GRID_VOCAB
        self._vocab = _checked_vocab(grid_vocab)
        player, ice, hole, goal, player_in_hole, player_on_goal = self._vocab
        self._symbols = {"S": ice, "F": ice, "H": hole, "G": goal}
        self._symbols_with_player = {"S": player, "F": player, "H": player_in_hole, "G": player_on_goal}
        self.is_slippery = is_slippery
        self._size = size
        self._p = p
        self._fixed_rows = None if map_rows is None else read_map(map_rows)
        if env_instruction is None:
            env_instruction = self._default_rules()
        self._instruction = env_instruction
        self._slips: np.random.Generator | None = None
        self.rows: Map = ()
        """The map of the current episode."""
        self.position = 0
        """The player's cell: row · width + column."""

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        """Draws the map of `seed`. Without a seed, one is derived from the last episode's seed."""
        self._seed = episode_seed(seed, self._seed)
        self.rows = self._fixed_rows or random_map(self._seed, self._size, self._p, self._split)
        self._letters = "".join(self.rows)
        self._map_id = f"{map_hash(self.rows):016x}"
        self._moves = neighbours(len(self.rows), len(self.rows[0]))
        self._marks: list[str] = []
        for marked in "GH":
            symbol = self._symbols[marked]
            cells = [cell for cell, letter in enumerate(self._letters) if letter == marked]
            self._marks += [symbol + self._place(cell) for cell in cells]
        self._slips = None
        if self.is_slippery:
            # Slips are drawn from a seed of their own: with the map's seed they would be correlated with the
            # holes.
            self._slips = np.random.default_rng(derive_seed(self._seed, "slips"))
        self.position = self._letters.index("S")
        return self._observe(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        if not self.rows:
            raise EnvironmentFault("FrozenLakeEnv.step came before reset; call reset(seed=…) first")
        number = self._numbers.get(action.strip().lower())
        start = self.position
        if number is not None and self._letters[start] not in "GH":
            self.position = self._moves[start][self._slipped(number)]
        letter = self._letters[self.position]
        is_new = self.position != start
        is_success = letter == "G"
        return self._step(
            number,
            reward=float(is_new and is_success),
            is_success=is_success,
            is_effective=is_new,
            is_over=letter in "GH",
        )

    def state_key(self) -> str:
        """The hash of the map, and the position: the full state, even if the observation shows less."""
        return f"{self._map_id}:{self.position}"

    def expert_action(self) -> str:
        """The first action of a shortest path to the goal, as if no step slipped; `actions[0]` if there is no
        path."""
        path = shortest_path(self.rows, self.position)
        return self.actions[path[0] if path else 0]

    def render(self) -> NDArray[np.uint8]:
        return draw_lake(self.rows, self.position)

    def _slipped(self, number: int) -> int:
        if self._slips is None:
            return number
        return (number - 1 + int(3 * self._slips.random())) % 4

    def _cells(self) -> tuple[list[str], int]:
        cells = [self._symbols[letter] for letter in self._letters]
        cells[self.position] = self._player_symbol()
        return cells, len(self.rows[0])

    def _coordinates(self) -> str:
        """Player, goal and holes as `symbol row,column`, the player first. All other cells are ice."""
        player = self._player_symbol() + self._place(self.position)
        return " ".join([player, *self._marks])

    def _player_symbol(self) -> str:
        return self._symbols_with_player[self._letters[self.position]]

    def _place(self, position: int) -> str:
        row, column = divmod(position, len(self.rows[0]))
        return f"{row},{column}"

    def _default_rules(self) -> str:
        rules = self._rules(
            "You are on a frozen lake. Walk to the goal and don't step into a hole.",
            self._vocab.items(),
            "; the rest is ice.",
            "; the edge of the lake holds you.",
        )
        if self.is_slippery:
            rules += (
                "\nThe ice is slippery: two times in three you slide to one side of where you wanted to go."
            )
        return rules


def _checked_vocab(vocab: Mapping[str, str]) -> dict[str, str]:
    symbols = []
    if isinstance(vocab, Mapping):
        symbols = [symbol for symbol in vocab if isinstance(symbol, str) and symbol.strip()]
    if len(symbols) != len(GRID_VOCAB) or len(vocab) != len(GRID_VOCAB):
        raise EnvironmentFault(
            f"grid_vocab {vocab!r} must have six symbols with their meanings, in this order: "
            f"{', '.join(GRID_VOCAB.values())}"
        )
    return dict(vocab)
