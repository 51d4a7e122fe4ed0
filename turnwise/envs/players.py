"""Players without a model: baselines to compare with and teachers for demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from turnwise.protocols import HasExpert


@runtime_checkable
class HasActions(Protocol):
    """An environment with a fixed list of action words."""

    actions: tuple[str, ...]


class ExpertEnv(HasActions, HasExpert, Protocol):
    """An environment that knows a good action, too."""


@runtime_checkable
class Acting(Protocol):
    """Chooses the next action of the environment that it was made for, or None: it gives up. It plays one episode."""

    def act(self) -> str | None: ...


class Player(Acting, Protocol):
    """A player that knows all actions."""

    actions: tuple[str, ...]


class RandomPlayer:
    """Draws each action uniformly."""

    def __init__(self, env: HasActions, seed: int) -> None:
        self.actions = env.actions
        self._rng = random.Random(seed)

    def act(self) -> str:
        return self._rng.choice(self.actions)


class BlindPlayer:
    """Plays a fixed sequence of action numbers (`frozen_lake.map.best_blind_path`), repeating its last one at the end."""

    def __init__(self, env: HasActions, path: Sequence[int]) -> None:
        if not path:
            raise ValueError("a blind player needs a path of at least one action")
        self.actions = env.actions
        self._path = path
        self._num_played = 0

    def act(self) -> str:
        number = self._path[min(self._num_played, len(self._path) - 1)]
        self._num_played += 1
        return self.actions[number]


class ExpertPlayer:
    """Plays like the environment's own expert."""

    def __init__(self, env: ExpertEnv) -> None:
        self.actions = env.actions
        self._env = env

    def act(self) -> str:
        return self._env.expert_action()


class ErringPlayer:
    """Another player whose action is replaced by a uniformly drawn one with probability `error_rate`."""

    def __init__(self, player: Player, error_rate: float, seed: int) -> None:
        if not 0.0 <= error_rate <= 1.0:
            raise ValueError(f"got error_rate {error_rate}; it must be in [0, 1]")
        self.actions = player.actions
        self._player = player
        self._error_rate = error_rate
        self._rng = random.Random(seed)

    def act(self) -> str | None:
        intended = self._player.act()
        return self._rng.choice(self.actions) if self._rng.random() < self._error_rate else intended


class GivingUpPlayer:
    """Another player that gives up if `is_lost`: actions in a lost state teach nothing."""

    def __init__(self, player: Player, is_lost: Callable[[], bool]) -> None:
        self.actions = player.actions
        self._player = player
        self._is_lost = is_lost

    def act(self) -> str | None:
        return None if self._is_lost() else self._player.act()
