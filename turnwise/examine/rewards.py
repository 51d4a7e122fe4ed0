"""Makes the rewards that a config's `data.reward` names."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.config import AgenticConfig
from turnwise.config.schema.environments import RewardFunction
from turnwise.data.reward_calls import parameters_of
from turnwise.data.reward_functions import CompletionForm, FunctionReward
from turnwise.data.rewards import GroupReward, WeightedReward
from turnwise.data.tables import TableRow
from turnwise.errors import ConfigError, nearest
from turnwise.examine.constructors import named_parameters, required_names
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
    short_names = Counter(_short_name(entry) for entry in config.data.reward)
    rewards: list[WeightedReward] = []
    for entry in config.data.reward:
        if entry.name == "reward_model":
            continue
        name = _short_name(entry)
        if short_names[name] > 1:
            name = entry.name
        reward = _reward(config, entry, name)
        rewards.append(WeightedReward(name, entry.weight, reward))
    return rewards


def _short_name(entry: RewardFunction) -> str:
    return entry.name.rpartition(":")[2]


def functions_of(rewards: Sequence[WeightedReward]) -> list[FunctionReward]:
    """The rewards that are functions of completions."""
    return [weighted.reward for weighted in rewards if isinstance(weighted.reward, FunctionReward)]


def judges_of(rewards: Sequence[WeightedReward]) -> list[Judge]:
    """The language models among the rewards."""
    functions = [reward.function for reward in functions_of(rewards)]
    return [function for function in functions if isinstance(function, Judge)]


def _reward(config: AgenticConfig, entry: RewardFunction, name: str) -> Reward:
    function = load_object(REWARDS.get(entry.name) or entry.name, "data.reward", ConfigError)
    arguments = entry.args
    if isinstance(function, type):
        _check_arguments(entry, function)
        with Foreign(f"data.reward {entry.name}: making it", "at the start", are_faults=True):
            function = function(**arguments)
        arguments = {}
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(
            f"data.reward {entry.name} is a {kind}, which can't be called; a reward is a function, or a "
            "class with `__call__`"
        )
    if entry.name in CHECKED_REWARDS:
        arguments = {"checker": config.data.checker, **arguments}
    if "group" in parameters_of(function, entry.name):
        with_group = entry.model_copy(update={"args": {"group": None, **arguments}})
        _check_arguments(with_group, function)
        if entry.form is not None:
            raise ConfigError(
                f"data.reward {entry.name}: it gets a whole group, and `form` is for functions of completions"
            )
        if arguments:
            function = partial(function, **arguments)
        return GroupReward(name, function)
    default_form: CompletionForm = "messages" if _is_of_trl(function) else "text"
    reward = FunctionReward(
        name,
        function,
        recorded_text,
        config.data.prompt_key,
        arguments,
        entry.form or default_form,
    )
    if config.train_env_manager.env_tags:
        reward.check([TableRow("environments have no columns", {})])
    return reward


def recorded_text(trajectory: Trajectory) -> str:
    """The final answer, as it was recorded."""
    return trajectory.final_text


def _is_of_trl(function: Callable[..., Any]) -> bool:
    """Whether it is one of `trl.rewards`, whose completions are lists of messages."""
    while isinstance(function, partial):
        function = function.func
    module = str(inspect.unwrap(function).__module__)
    return f"{module}.".startswith("trl.rewards.")


def _check_arguments(entry: RewardFunction, called: Callable[..., Any]) -> None:
    """Raises ConfigError if `args` lacks a parameter without a default, or has a key that is no parameter."""
    key = f"data.reward {entry.name}: args"
    has_kwargs = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(called, entry.name).values()
    )
    parameters = named_parameters(called)
    names = [parameter.name for parameter in parameters]
    for name in entry.args:
        if name not in names and not has_kwargs:
            hint = nearest(name, names)
            raise ConfigError(f"{key}.{name} isn't a parameter; it has {', '.join(names) or 'none'}.{hint}")
    for name in required_names(parameters):
        if name not in entry.args:
            raise ConfigError(f"{key}.{name} is needed: give {{name: {entry.name}, args: {{{name}: …}}}}")
