"""Decides which groups are worth training on (`group_filter`)."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from turnwise.errors import ConfigError, RolloutError
from turnwise.runtime.entry_points import load_function
from turnwise.types import Group, are_equal


def non_zero_variance(group: Group) -> bool:
    """Whether the siblings' scores differ. Equal scores give no advantage (DAPO, Yu et al. 2025,
    arXiv:2503.14476)."""
    return not are_equal([trajectory.score for trajectory in group.trajectories])


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A function `keep(group) -> bool` and its name. The result may depend on nothing but the group, since
    groups come in any order. A call raises RolloutError if the function raises an exception, or returns
    anything but a bool."""

    name: str
    keep: Callable[[Group], bool]

    def __call__(self, group: Group) -> bool:
        try:
            is_kept = self.keep(group)
        except Exception as fault:  # boundary: a user's function may raise anything
            frame = traceback.extract_tb(fault.__traceback__)[-1]
            raise RolloutError(
                f"group_filter {self.name} raised {type(fault).__name__}: {fault} ({frame.filename}, line "
                f"{frame.lineno}) on {group.task.id}; fix it, or remove group_filter"
            ) from fault
        # Without this check, a function that forgets to return drops every group, and a coroutine function
        # keeps every group.
        if not isinstance(is_kept, bool | np.bool_):
            raise RolloutError(
                f"group_filter {self.name} returned {is_kept!r} on {group.task.id}; a filter returns True to "
                "keep the group, else False"
            )
        return bool(is_kept)


def load_group_filter(name: str | None) -> GroupFilter | None:
    """The filter `name`: `non_zero_variance`, or a user's `module:function`. Raises ConfigError if no such
    function exists."""
    if name is None:
        return None
    if name == "non_zero_variance":
        return GroupFilter(name, non_zero_variance)
    return GroupFilter(name, load_function(name, "group_filter", ConfigError, ["group"]))
