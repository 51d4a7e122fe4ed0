"""Makes the rewards that a config's `data.reward` names."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.config import AgenticConfig
from turnwise.config.schema.environments import RewardFunction
from turnwise.data.reward_calls import parameters_of
from turnwise.data.reward_functions import FunctionReward
from turnwise.data.rewards import GroupReward, WeightedReward
from turnwise.data.tables import TableRow
from turnwise.errors import ConfigError, nearest
from turnwise.examine.constructors import named_parameters
from turnwise.inference.judge import Judge
from turnwise.protocols import Reward
from turnwise.runtime.entry_points import load_object
from turnwise.runtime.foreign import Foreign
from turnwise.spec import CHECKED_REWARDS, REWARDS
from turnwise.types import Trajectory


def make_rewards(config: AgenticConfig) -> list[WeightedReward]:
    """The entries of `data.reward` except the reward model, in the config's order. The name `module:function`
    is shortened to `function` if no other reward has that name. Functions read the recorded texts of
    responses."""
    brief = [asked.name.rpartition(":")[2] for asked in config.data.reward]
    loaded: list[WeightedReward] = []
    for asked, name in zip(config.data.reward, brief, strict=True):
        if asked.name != "reward_model":
            name = name if brief.count(name) == 1 else asked.name
            loaded.append(WeightedReward(name, asked.weight, _reward(config, asked, name)))
    return loaded


def judges_of(rewards: Sequence[WeightedReward]) -> list[Judge]:
    """The language models among the rewards."""
    called = [weighted.reward.function for weighted in rewards if isinstance(weighted.reward, FunctionReward)]
    return [function for function in called if isinstance(function, Judge)]


def _reward(config: AgenticConfig, asked: RewardFunction, name: str) -> Reward:
    found, arguments = (
        load_object(REWARDS.get(asked.name) or asked.name, "data.reward", ConfigError),
        asked.args,
    )
    if isinstance(found, type):
        _check_arguments(asked, found)
        with Foreign(f"data.reward {asked.name}: making it", "at the start", are_faults=True):
            found, arguments = found(**arguments), {}
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(
            f"data.reward {asked.name} is a {kind}, which can't be called; a reward is a function, or a "
            f"class with `__call__`"
        )
    if asked.name in CHECKED_REWARDS:
        arguments = {"checker": config.data.checker, **arguments}
    if "group" in parameters_of(found, asked.name):
        _check_arguments(asked.model_copy(update={"args": {"group": None, **arguments}}), found)
        if asked.form is not None:
            raise ConfigError(
                f"data.reward {asked.name}: it gets a whole group, and `form` is for functions of completions"
            )
        return GroupReward(name, partial(found, **arguments) if arguments else found)
    form = asked.form or ("messages" if _is_of_trl(found) else "text")
    function = FunctionReward(name, found, recorded_text, config.data.prompt_key, arguments, form)
    if config.train_env_manager.env_tags:
        function.check([TableRow("environments have no columns", {})])
    return function


def recorded_text(trajectory: Trajectory) -> str:
    """The text of the last response, as it was recorded."""
    return trajectory.turns[-1].text


def _is_of_trl(function: Callable[..., Any]) -> bool:
    """Whether it is one of `trl.rewards`, whose completions are lists of messages."""
    while isinstance(function, partial):
        function = function.func
    module = str(inspect.unwrap(function).__module__)
    return f"{module}.".startswith("trl.rewards.")


def _check_arguments(asked: RewardFunction, called: Callable[..., Any]) -> None:
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters_of(called, asked.name).values())
    named = {p.name: p for p in named_parameters(called)}
    what = f"data.reward {asked.name}: args"
    if not takes_any and (unknown := [key for key in asked.args if key not in named]):
        hint = nearest(unknown[0], named)
        raise ConfigError(
            f"{what}.{unknown[0]} isn't a parameter; it has {', '.join(named) or 'none'}.{hint}"
        )
    if missing := [name for name, p in named.items() if p.default is p.empty and name not in asked.args]:
        raise ConfigError(
            f"{what}.{missing[0]} is needed: give {{name: {asked.name}, args: {{{missing[0]}: …}}}}"
        )
