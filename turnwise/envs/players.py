"""Players without a model: baselines, and teachers for demonstrations."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.errors import EnvironmentFault
from turnwise.protocols import HasExpert


@runtime_checkable
class HasActions(Protocol):
    """An environment with a fixed list of action words."""

    actions: tuple[str, ...]


@runtime_checkable
class Acting(Protocol):
    """Plays one episode of the environment that it was made for: chooses the next action, or gives up (None)."""

    def act(self) -> str | None: ...


class Player(Acting, Protocol):
    """A player that knows all actions."""

    actions: tuple[str, ...]


def actions_of(env: Any, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The action words: the given ones, else the environment's own `actions`. May be empty."""
    actions: Any = given or (env.actions if isinstance(env, HasActions) else ())
    if isinstance(actions, str) or not isinstance(actions, Sequence) or not all(isinstance(word, str) for word in actions):
        raise EnvironmentFault(f"{type(env).__name__}.actions is {repr(actions)[:60]}; a random player needs a sequence of str")
    return tuple(actions)


class RandomPlayer:
    """Draws each action uniformly from the given actions, else from the environment's own."""

    def __init__(self, env: Any, seed: int, actions: Sequence[str] = ()) -> None:
        self.actions = actions_of(env, actions)
        self._rng = random.Random(seed)

    def act(self) -> str:
        return self._rng.choice(self.actions)


class BlindPlayer:
    """Plays a fixed sequence of action numbers (`frozen_lake.map.best_blind_path`), then repeats its last one."""

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

    def __init__(self, env: HasExpert, actions: Sequence[str] = ()) -> None:
        self.actions = actions_of(env, actions)
        self._env = env

    def act(self) -> str:
        action: Any = self._env.expert_action()
        if not isinstance(action, str):
            raise EnvironmentFault(f"{type(self._env).__name__}.expert_action() gave {action!r}; an action is a str")
        return action


class ErringPlayer:
    """Plays like another player, but replaces each action by a uniformly drawn one with probability `error_rate`."""

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
    """Plays like another player, but gives up if `is_lost`: actions in a lost state teach nothing."""

    def __init__(self, player: Player, is_lost: Callable[[], bool]) -> None:
        self.actions = player.actions
        self._player = player
        self._is_lost = is_lost

    def act(self) -> str | None:
        return None if self._is_lost() else self._player.act()
