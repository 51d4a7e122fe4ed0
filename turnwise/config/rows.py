"""Rows and rewards of a config: what the table says of them, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.config.problems import Problem
from turnwise.config.schema import AgenticConfig
from turnwise.errors import counted
from turnwise.spec import ROWS_TAG


def row_problems(config: AgenticConfig) -> Iterator[Problem]:
    """Faults in the use of `data`."""
    data, has_rows = config.data, config.train_env_manager.has_rows
    if ROWS_TAG in config.custom_envs:
        yield Problem(
            ("custom_envs", ROWS_TAG), "is the tag of the rows of data.train_files; give this environment another one"
        )
    elif data.train_files is not None and not data.train_files:
        yield Problem.at("data.train_files", "[] leaves nothing to play; name files of rows, or leave it out")
    elif data.train_files and not has_rows:
        message = f"are not played: train_env_manager.tags doesn't name {ROWS_TAG!r}; add it, or leave tags out"
        yield Problem.at("data.train_files", message)
    if has_rows and not data.reward:
        message = "is unset, and nothing else rewards the rows of train_files; name exact_match, or module:function of your own"
        yield Problem.at("data.reward", message)
    if config.uses_validation and has_rows and not config.val_env_manager.tags:
        yield Problem.at("eval_steps", f"{config.eval_steps} asks for validation, and there are no data.val_files; name some")
    if data.num_epochs is not None and not has_rows:
        yield Problem.at("data.num_epochs", "counts how often rows are played, and there are no data.train_files")
    for index, reward in enumerate(data.reward):
        if reward.name == "reward_model" and reward.args:
            yield Problem(("data", "reward", index, "args"), "reward_model takes no args; the section `reward` configures it")
    names = [reward.name for reward in data.reward]
    if config.has_own_judge:
        strategy = config.reward.strategy_args.strategy_name
        if config.needs_reward_model:
            message = "reward_model and a judge without base_url both want the reward role's model; give the judge a base_url"
            yield Problem.at("data.reward", message)
        elif strategy not in ("embedded", "hf"):
            message = (
                f"{strategy} doesn't serve a judge in the run's process; take embedded or hf, or give the judge a base_url"
            )
            yield Problem.at("reward.strategy_args.strategy_name", message)
    for name in {name for name in names if names.count(name) > 1}:
        yield Problem.at(
            "data.reward", f"{name} stands there {names.count(name)} times; give it once, with the sum of its weights"
        )


def data_rows(config: AgenticConfig) -> Iterator[tuple[str, str]]:
    """The rows that are played, and the rewards of every episode."""
    if config.train_env_manager.has_rows:
        order = "in a new order each epoch" if config.data.shuffle else "in their order"
        order = "drawn by their success (curriculum)" if config.data.curriculum else order
        often = f", {counted(config.data.num_epochs, 'epoch')}" if config.data.num_epochs else ""
        agent = f"{config.data.default_agent} unless a row's {config.data.agent_name_key} names another"
        yield "data", f"rows of {', '.join(config.data.train_files or ())}, {order}{often}, by {agent}"
    if config.data.reward:
        yield "rewards", " + ".join(f"{reward.weight:g} × {reward.name}" for reward in config.data.reward)
