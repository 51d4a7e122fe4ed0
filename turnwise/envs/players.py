"""Players without a model: baselines, and teachers for demonstrations."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.envs.arguments import is_list_of_str
from turnwise.errors import EnvironmentFault
from turnwise.protocols import HasExpert, HasRandomAction


@runtime_checkable
class HasActions(Protocol):
    """An environment that lists the words of its actions."""

    actions: tuple[str, ...]


@runtime_checkable
class Acting(Protocol):
    """A player for one episode of one environment."""

    def act(self) -> str | None:
        """The next action; None to give up."""


class Player(Acting, Protocol):
    """A player that can also draw an action at random."""

    draw: "ActionDraw"


def actions_of(env: Any, words: Sequence[str] = ()) -> tuple[str, ...]:
    """The words of the actions: `words`, else `env.actions`, else none. Raises EnvironmentFault unless all
    are str."""
    actions: Any = words
    if not words and isinstance(env, HasActions):
        actions = env.actions
    if not is_list_of_str(actions):
        raise EnvironmentFault(
            f"{type(env).__name__}.actions is {repr(actions)[:60]}; a random player needs a sequence of str"
        )
    return tuple(actions)


class ActionDraw:
    """Draws actions of an environment at random: from `words`, else by `env.random_action`, else from
    `env.actions`. It is false if there are none of these. A draw raises EnvironmentFault if `random_action`
    gives anything but a str."""

    def __init__(self, env: Any, words: Sequence[str] = ()) -> None:
        self._words = actions_of(env, words)
        self._env: HasRandomAction | None = None
        if not words and isinstance(env, HasRandomAction):
            self._env = env

    def __bool__(self) -> bool:
        return bool(self._env or self._words)

    def __call__(self, rng: random.Random) -> str:
        if self._env is None:
            return rng.choice(self._words)
        action: Any = self._env.random_action(rng)
        if not isinstance(action, str):
            raise EnvironmentFault(
                f"{type(self._env).__name__}.random_action() gave {action!r}; an action is a str"
            )
        return action


class RandomPlayer:
    """Draws each action at random: see `ActionDraw`."""

    def __init__(self, env: Any, seed: int, actions: Sequence[str] = ()) -> None:
        self.draw = ActionDraw(env, actions)
        self._rng = random.Random(seed)

    def act(self) -> str:
        return self.draw(self._rng)


class BlindPlayer:
    """Plays a fixed list of action numbers, such as that of `frozen_lake.map.best_blind_path`, then repeats
    the last number."""

    def __init__(self, env: HasActions, path: Sequence[int]) -> None:
        if not path:
            raise ValueError("a blind player needs a path of at least one action")
        self.draw = ActionDraw(env)
        self._actions = env.actions
        self._path = path
        self._num_played = 0

    def act(self) -> str:
        number = self._path[min(self._num_played, len(self._path) - 1)]
        self._num_played += 1
        return self._actions[number]


class ExpertPlayer:
    """Plays the environment's `expert_action()`."""

    def __init__(self, env: HasExpert, actions: Sequence[str] = ()) -> None:
        self.draw = ActionDraw(env, actions)
        self._env = env

    def act(self) -> str:
        action: Any = self._env.expert_action()
        if not isinstance(action, str):
            raise EnvironmentFault(
                f"{type(self._env).__name__}.expert_action() gave {action!r}; an action is a str"
            )
        return action


class ErringPlayer:
    """Plays like another player and gives up where it does, but with probability `error_rate` draws an action
    at random."""

    def __init__(self, player: Player, error_rate: float, seed: int) -> None:
        if not 0.0 <= error_rate <= 1.0:
            raise ValueError(f"got error_rate {error_rate}; it must be in [0, 1]")
        self.draw = player.draw
        self._player = player
        self._error_rate = error_rate
        self._rng = random.Random(seed)

    def act(self) -> str | None:
        intended = self._player.act()
        if intended is not None and self._rng.random() < self._error_rate:
            return self.draw(self._rng)
        return intended


class GivingUpPlayer:
    """Plays like another player, but gives up as soon as `is_lost()`: actions in a lost state teach
    nothing."""

    def __init__(self, player: Player, is_lost: Callable[[], bool]) -> None:
        self.draw = player.draw
        self._player = player
        self._is_lost = is_lost

    def act(self) -> str | None:
        if self._is_lost():
            return None
        return self._player.act()
