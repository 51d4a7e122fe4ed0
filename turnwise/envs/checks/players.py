"""Players for any environment: a random player over its actions, or its own expert."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.envs.players import HasActions
from turnwise.errors import EnvironmentFault
from turnwise.protocols import HasExpert
from turnwise.types import derive_seed

Choose = Callable[[], str]
"""The next action of the current episode."""


def actions_of(env: Any, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The action words: the given ones, else the environment's own `actions`; perhaps empty.

    Raises:
        EnvironmentFault: its `actions` aren't words.
    """
    if given:
        return tuple(given)
    if not isinstance(env, HasActions):
        return ()
    actions: Any = env.actions
    if isinstance(actions, str) or not isinstance(actions, Sequence) or not all(isinstance(word, str) for word in actions):
        shown = repr(actions)[:60]
        raise EnvironmentFault(f"{type(env).__name__}.actions is {shown}; a random player needs a sequence of str")
    return tuple(actions)


def random_of(env: Any, seed: int, given: Sequence[str] = ()) -> Choose | None:
    """A player that draws from the environment's actions, or from the given ones; None without actions.

    Raises:
        EnvironmentFault: its `actions` aren't words.
    """
    actions = actions_of(env, given)
    return partial(random.Random(derive_seed(seed, "random player")).choice, actions) if actions else None


def expert_of(env: Any) -> Choose | None:
    """The environment's own expert, None if it has none.

    Raises:
        EnvironmentFault: (when asked) its action is no word.
    """
    if not isinstance(env, HasExpert):
        return None

    def choose() -> str:
        action: Any = env.expert_action()
        if not isinstance(action, str):
            raise EnvironmentFault(f"{type(env).__name__}.expert_action() gave {action!r}; an action is a str")
        return action

    return choose
