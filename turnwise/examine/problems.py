"""The faults of what a config names: every part is asked for once, and what it raises becomes a problem of
its key."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.problems import Path, Problem
from turnwise.envs.registry import env_class, takes_split
from turnwise.errors import ConfigError, DataError, NotAvailableError, TurnwiseError
from turnwise.examine.agents import env_agent_class, row_agent_class
from turnwise.examine.envs import check_shown_metrics, try_environment
from turnwise.examine.examined import Examined, ExaminedSFT
from turnwise.examine.files import absent_files, is_elsewhere, is_here, named_files
from turnwise.examine.gateway import check_players
from turnwise.examine.rows import splits_with_rows
from turnwise.examine.template import try_rows_template, try_template
from turnwise.model_files.folder import folder_here
from turnwise.spec import AGENTS, ENVS, ESTIMATORS, PG_VARIANTS
from turnwise.types import Split

Check = tuple[Path, Callable[[], object]]
"""A key of the config, and a function that raises TurnwiseError if what the key names is wrong."""


def problems(examined: Examined | ExaminedSFT, may_miss: bool = False) -> Iterator[Problem]:
    """Yields the faults that a run would meet before it loads a model: those of the user's own objects and
    files or, if there are none, that of the chat template. Raises NotAvailableError at the end if something
    isn't installed. `may_miss` allows files that don't exist."""
    is_right = True
    for problem in object_problems(examined, may_miss):
        is_right = False
        yield problem
    if is_right:
        yield from _template_problems(examined)


def object_problems(examined: Examined | ExaminedSFT, may_miss: bool = False) -> Iterator[Problem]:
    """Like `problems`, without the chat template: the model's folder need not be here."""
    if isinstance(examined, ExaminedSFT):
        yield from _source_problems(examined, may_miss)
        return
    missing: NotAvailableError | None = None
    wrong: set[Path] = set()
    texts: set[str] = set()
    for path, check in _checks(examined, may_miss):
        section = path[:2]
        if section in wrong:
            continue
        try:
            check()
        except NotAvailableError as error:
            missing = missing or error
        except TurnwiseError as error:
            wrong.add(section)
            text = str(error)
            if text not in texts:
                texts.add(text)
                yield Problem(path, _without_key(text, section))
    if missing:
        raise missing


def _without_key(text: str, section: Path) -> str:
    """The text of an error without the key at its beginning, which a problem writes itself."""
    key = re.escape(Problem(section, "").key)
    return re.sub(rf"^{key}(\.\w+)?:? ", "", text)


def _source_problems(examined: ExaminedSFT, may_miss: bool) -> Iterator[Problem]:
    """Yields, per source of demonstrations, the first fault that shows without a tokenizer."""
    for key, names in named_files(examined.config).items():
        for index, name in enumerate(names):
            if may_miss and not is_elsewhere(name) and not is_here(name):
                continue
            try:
                examined.source(key, name)
            except (DataError, NotAvailableError) as error:
                yield Problem((key, index), str(error))


def _checks(examined: Examined, may_miss: bool) -> Iterator[Check]:
    config = examined.config
    yield ("group_filter",), lambda: examined.group_filter
    own_loss = config.pg_variant not in PG_VARIANTS
    if own_loss or config.adv_estimator not in ESTIMATORS:
        from turnwise.examine.algorithm import make_algorithm  # imports torch, as a user's own loss does

        key = "pg_variant" if own_loss else "adv_estimator"
        yield (key,), partial(make_algorithm, config)
    if config.data.reward or config.data.train_files:
        yield from _row_checks(examined, may_miss)
    yield from _env_checks(config)


def _row_checks(examined: Examined, may_miss: bool) -> Iterator[Check]:
    config = examined.config
    absent: set[str] = set()
    if may_miss:
        absent = {key for key, _ in absent_files(config)}
    yield ("data", "reward"), lambda: examined.rewards
    if absent.isdisjoint(("agent.tool_config_path", "agent.function_tool_path")):
        key = "tools"
        if config.agent.tool_config_path:
            key = "tool_config_path"
        elif config.agent.function_tool_path:
            key = "function_tool_path"
        yield ("agent", key), lambda: examined.tools
    if "agent.interaction_config_path" not in absent:
        yield ("agent", "interaction_config_path"), lambda: examined.users
    if config.agent.graph:
        yield ("agent", "graph"), lambda: examined.make_graph
    if config.needs_reward_role and folder_here(config.reward.model_args.model_name_or_path):
        from turnwise.examine.reward_role import check_reward_role  # imports transformers

        yield ("reward_pretrain",), partial(check_reward_role, config)
    is_agent_here = not any(key.startswith("agent.") for key in absent)
    for split in splits_with_rows(config):
        if is_agent_here and f"data.{split}_files" not in absent:
            yield ("data", f"{split}_files"), partial(_check_rows, examined, split)
    if config.data.train_files and is_agent_here and not any(key.startswith("data.") for key in absent):
        yield ("agent", "play"), partial(check_players, examined)


def _check_rows(examined: Examined, split: Split) -> None:
    """Reads the rows of a split, and checks the classes of the agents that they name."""
    for name, place in examined.rows(split).agents().items():
        try:
            row_agent_class(examined.config, examined.loops, name)
        except ConfigError as fault:
            raise DataError(f"{place}: {fault}") from fault
        except NotAvailableError as fault:
            raise NotAvailableError(f"{place}: {fault}") from fault


def _env_checks(config: AgenticConfig) -> Iterator[Check]:
    tried: set[str] = set()
    for split in get_args(Split):
        for tag in config.env_manager(split).env_tags:
            env = config.custom_envs[tag]
            targets = (ENVS.get(env.env_type), AGENTS.get(env.agent_name))
            if "" in targets:
                continue  # not in this version, which another check says
            yield ("custom_envs", tag, "env_type"), partial(env_class, env.env_type)
            yield ("custom_envs", tag, "agent_name"), partial(env_agent_class, config, tag)
            key = "env_config" if env.env_config else "env_type"
            yield ("custom_envs", tag, key), partial(_try_once, config, tag, split, tried)
    yield ("show_metrics",), partial(check_shown_metrics, config)


def _try_once(config: AgenticConfig, tag: str, split: Split, tried: set[str]) -> None:
    """Tries an environment of the tag, unless it doesn't know its split and was tried for the other one."""
    if tag not in tried or takes_split(config.custom_envs[tag].env_type):
        tried.add(tag)
        try_environment(config, tag, split)


def _template_problems(examined: Examined | ExaminedSFT) -> Iterator[Problem]:
    """Yields the first fault of the chat template with the config's variables, rows and tools, if their files
    are here."""
    config = examined.config
    arguments = config.model_args if isinstance(config, SFTConfig) else config.actor_train.model_args
    folder = folder_here(arguments.model_name_or_path)
    if folder is None:
        return
    try:
        if isinstance(examined, ExaminedSFT) or not examined.config.train_env_manager.has_rows:
            try_template(config, folder)
        elif not any(absent_files(config)):
            try_rows_template(examined)
    except TurnwiseError as error:
        key, _, message = str(error).partition(": ")
        section = key.partition(".")[0]
        if section in type(config).model_fields:
            yield Problem.at(key, message)
        else:
            yield Problem(("pretrain",), str(error))
