"""Builds tasks from the data sets of a config's `data` section, and the agents that play them."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.build.envs import asked_parts, make_agent, named_parameters, offered_parts
from turnwise.build.prompt_check import continued_problem, warn_of_turn_tokens
from turnwise.build.reward_model import check_reward_role
from turnwise.build.rewards import judges_of, load_rewards
from turnwise.build.tools import agent_name, build_interactions, build_tools, check_tools_of_rows, check_users_of_rows
from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig
from turnwise.config.tools import LoopEntry, read_loop_file
from turnwise.data.bad_rows import BadRows
from turnwise.data.demonstrations import message_problem
from turnwise.data.forms import as_task, form_hint, form_of
from turnwise.data.prompts import has_calls, has_messages, prompt_of, with_plain_messages
from turnwise.data.reward_functions import FunctionReward
from turnwise.data.tables import TableRow, noting, read_tables
from turnwise.entry_points import load_class
from turnwise.errors import ConfigError, DataError, NotAvailableError, ServerError, counted, nearest
from turnwise.hub import local_path
from turnwise.inference.model_user import ModelUser
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.model_folder import folder_here
from turnwise.models.load import load_tokenizer, policy_info
from turnwise.protocols import AgentLoop
from turnwise.rollout.tasks import CurriculumTasks, DataRow, RowTasks, SeededTasks, TaskSource
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.spec import AGENTS, ROWS_TAG
from turnwise.types import Split, Task

logger = logging.getLogger(__name__)

_SPLITS: tuple[Split, ...] = ("train", "val")
_TEMPLATE_BYTES = 256  # more than a chat template adds to a message


def rows_plug_ins(
    config: AgenticConfig, may_miss: bool = False
) -> Iterator[tuple[tuple[str | int, ...], Callable[[], object]]]:
    """Yields `(config key, check)`, like `plug_ins`, for rewards, tools, users and rows. `may_miss` allows missing files."""

    def are_there(*paths: str | None) -> bool:
        return not may_miss or all(path is None or local_path(path).exists() for path in paths)

    yield ("data", "reward"), partial(load_rewards, config)
    agent = config.agent
    paths = (agent.tool_config_path, agent.function_tool_path, agent.interaction_config_path, agent.agent_config_path)
    if are_there(*paths[:2]):
        key = next((key for key in ("tool_config_path", "function_tool_path") if vars(agent)[key]), "tools")
        yield ("agent", key), partial(build_tools, config)
    if are_there(agent.interaction_config_path):
        yield ("agent", "interaction_config_path"), partial(build_interactions, config)
    if config.needs_reward_role and folder_here(config.reward.model_args.model_name_or_path):
        yield ("reward_pretrain",), partial(check_reward_role, config)
    for split in _splits_with_rows(config):
        if are_there(*paths, *(name for name in _files(config, split) if Path(name).suffix)):
            yield ("data", f"{split}_files"), partial(_check_rows, config, split)


def _splits_with_rows(config: AgenticConfig) -> list[Split]:
    """The splits that this config plays and that have rows of data sets among their tasks."""
    return [split for split in _SPLITS if config.env_manager(split).has_rows and (split == "train" or config.uses_validation)]


def _files(config: AgenticConfig, split: Split) -> list[str]:
    return (config.data.train_files if split == "train" else config.data.val_files) or []


def _check_rows(config: AgenticConfig, split: Split) -> None:
    """Checks the rows of a split and the agents that they name: reads all rows, and makes one agent of each name."""
    places: dict[str, str] = {}
    for place, row in load_rows(config, split):
        places.setdefault(row.agent, place)
    for name, place in places.items():
        try:
            build_row_agent(config, split, name, WatchedRunner())
        except ConfigError as fault:
            raise DataError(f"{place}: {fault}") from fault


def load_rows(config: AgenticConfig, split: Split, says_skipped: bool = False) -> list[tuple[str, DataRow]]:
    """The rows of a split, each with its place for error messages. A row's column `data_source` is the tag under which metrics
    count it; without one the tag is `data`. Rows of the wrong shape are left out under `data.on_bad_row: skip`; with
    `says_skipped` a warning counts them. Raises DataError if a row lacks something that its agent, tools or rewards need."""
    data, rows, bad = config.data, list[tuple[str, DataRow]](), BadRows()
    key, loops = f"data.{split}_files", _own_loops(config)
    rewards = [weighted.reward for weighted in load_rewards(config) if isinstance(weighted.reward, FunctionReward)]
    tables = []
    for row in _plain_rows(config, read_tables(_files(config, split), key, bad), bad):
        try:
            _check_shape(config, row, rewards)
        except DataError as fault:
            bad.add(str(fault))
        else:
            tables.append(row)
    if data.on_bad_row == "error":
        bad.refuse()
    elif says_skipped or not tables:
        bad.leave_out(key, len(tables) + len(bad.sentences))
    for row in tables:
        source = row.columns.get("data_source")
        tag = source if isinstance(source, str) and source else ROWS_TAG
        rows.append((row.place, DataRow(tag, _agent_of(config, row, loops), row.columns)))
    check_tools_of_rows(config, tables)
    check_users_of_rows(config, tables)
    return rows


def _plain_rows(config: AgenticConfig, tables: Sequence[TableRow], bad: BadRows) -> Iterator[TableRow]:
    """Yields the rows with their prompt in the form of `data.format`, and their messages without what tables pad them with."""
    data = config.data
    schemas: Tools | None = None
    for row in tables:
        columns = row.columns
        if data.format is not None:
            try:
                columns = as_task(columns, data.format, data.prompt_key)
            except DataError as fault:
                bad.add(f"{row.place}: {fault}")
                continue
        if has_calls(columns):
            schemas = build_tools(config).schemas if schemas is None else schemas
            columns = with_plain_messages(columns, schemas)
        elif has_messages(columns):
            columns = with_plain_messages(columns)
        yield TableRow(row.place, columns)


def _check_shape(config: AgenticConfig, row: TableRow, rewards: Sequence[FunctionReward]) -> None:
    """Raises DataError, which names the row, if it lacks a prompt or what a reward needs."""
    key = config.data.prompt_key
    if row.columns.get(key) is None:
        hint = nearest(key, row.columns)
        form = form_hint(row.columns) if config.data.format is None else ""
        raise DataError(
            f"{row.place}: there is no column {key!r}; it has {', '.join(row.columns) or 'none'}. data.prompt_key names the "
            f"column of the prompt.{hint}{form}"
        )
    if problem := _prompt_problem(row.columns[key]):
        raise DataError(f"{row.place}: column {key!r} {problem}; a prompt is a string or a list of messages")
    for reward in rewards:
        try:
            reward.check([row])
        except DataError as fault:
            form = form_hint(row.columns) if config.data.format is None and form_of(row.columns) else ""
            raise DataError(f"{fault}.{form}" if form else str(fault)) from fault


def _prompt_problem(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "" if prompt.strip() else "is empty"
    if not isinstance(prompt, list) or not prompt:
        return f"is {str(prompt)[:40]!r}"
    if problem := next(filter(None, (message_problem(index, message) for index, message in enumerate(prompt))), ""):
        return problem
    return continued_problem(prompt)


def _own_loops(config: AgenticConfig) -> Mapping[str, LoopEntry]:
    path = config.agent.agent_config_path
    return read_loop_file(path) if path else {}


def _agent_of(config: AgenticConfig, row: TableRow, loops: Mapping[str, LoopEntry]) -> str:
    name = agent_name(config, row)
    if name in loops or AGENTS.get(name) or ":" in name:
        return name
    known = ", ".join([*(agent for agent, target in AGENTS.items() if target), *loops])
    if name in AGENTS:
        raise NotAvailableError(f"{row.place}: the agent {name} isn't in this version, which has {known}")
    raise DataError(f"{row.place}: agent {name!r} isn't one of {known}, nor module:Class.{nearest(name, AGENTS)}")


def build_tasks(config: AgenticConfig, split: Split, template: ChatTemplate) -> TaskSource:
    """The tasks of a split in playing order. Rows whose prompts are too long are left out, and a warning says how many."""
    manager, is_training = config.env_manager(split), split == "train"
    agents = {tag: config.custom_envs[tag].agent_name for tag in manager.env_tags}
    rows = None
    if manager.has_rows:
        fitting = _fitting(config, split, template)
        num_epochs = config.data.num_epochs if is_training else 1
        rows = RowTasks(config.seed, split, fitting, config.data.shuffle and is_training, num_epochs)
    if config.data.curriculum and is_training:
        return CurriculumTasks(config.seed, split, manager.tags, agents, rows, ROWS_TAG, config.num_task_versions)
    if rows is not None and not manager.env_tags:
        return rows
    return SeededTasks(config.seed, split, tuple(manager.tags), tuple(manager.num_groups_partition), agents, rows, ROWS_TAG)


def row_tasks(config: AgenticConfig, split: Split) -> list[Task]:
    """A task for each row in the order of the files. Rows with too long prompts are included."""
    rows = [row for _, row in load_rows(config, split)]
    source = RowTasks(config.seed, split, rows, shuffle=False)
    return [replace(source.task(number), id=f"{split}/row-{number}") for number in range(len(rows))]


def _fitting(config: AgenticConfig, split: Split, template: ChatTemplate, most: int | None = None) -> list[DataRow]:
    """The rows whose prompts aren't too long, or the first `most` of them. Raises DataError if all prompts are too long."""
    data, rows = config.data, load_rows(config, split, says_skipped=most is None)
    room = config.sequence_length - config.max_new_tokens(split, ROWS_TAG)
    # If a response may fill the context, a prompt may fill half of it.
    limit = data.max_prompt_length or (room if room > 0 else config.sequence_length // 2)
    schemas = build_tools(config).schemas
    warn_of_turn_tokens(rows, data.prompt_key, template, f"data.{split}_files")
    noted = noting(rows, f"measuring the prompts of data.{split}_files")
    all_fitting = (
        row
        for _, row in noted
        if _fits(row.payload, data.prompt_key, template, limit, schemas if row.agent == "tool_agent" else ())
    )
    fitting = list(islice(all_fitting, most))
    key = "data.max_prompt_length" if data.max_prompt_length else "sequence_length without max_new_tokens"
    if not fitting:
        raise DataError(
            f"data.{split}_files: all {counted(len(rows), 'prompt')} have more than {limit} tokens ({key}); raise that, or "
            "shorten the prompts"
        )
    if most is None and len(fitting) < len(rows):
        logger.warning(
            "data.%s_files: %d of %d rows are left out, since their prompts have more than %d tokens (%s)",
            split,
            len(rows) - len(fitting),
            len(rows),
            limit,
            key,
        )
    return fitting


def check_template(config: AgenticConfig) -> None:
    """Tries the chat template of the policy as a run uses it: its variables, the parser of tool calls, the first prompt with
    tools, and whether any prompt leaves room for a response. Raises the TurnwiseError of the first fault."""
    arguments = config.actor_train.model_args
    path, trust = arguments.model_name_or_path, arguments.trust
    ends = policy_info(path, config.actor_infer.model_args.dtype, config.sequence_length, trust=trust).stop_token_ids
    template = tried(ChatTemplate(load_tokenizer(path, trust), template_kwargs=config.template_kwargs, eos_token_ids=ends))
    len(template.stop_token_ids)  # asks how it ends a turn
    schemas = build_tools(config).schemas
    for split in _splits_with_rows(config):
        with_tools = (row.payload for _, row in load_rows(config, split) if row.agent == "tool_agent")
        for columns in islice(with_tools, 1):
            template.start(prompt_of(columns, config.data.prompt_key, schemas), schemas)
        _fitting(config, split, template, most=1)
    if schemas:
        find_parser(config.agent.tool_parser, template)


def _fits(columns: Mapping[str, Any], prompt_key: str, template: ChatTemplate, limit: int, tools: Tools) -> bool:
    prompt = columns[prompt_key]
    num_messages = 1 if isinstance(prompt, str) else len(prompt)
    num_bytes = len(json.dumps(prompt, ensure_ascii=False).encode()) + _TEMPLATE_BYTES * num_messages
    if not tools and num_bytes <= limit:
        return True  # no tokenizer makes more tokens than there are bytes
    return len(template.start(prompt_of(columns, prompt_key, tools), tools)) <= limit


def call_models(config: AgenticConfig) -> None:
    """Sends a request to each model behind a URL that the config uses as a judge or simulated user. Raises ConfigError if
    nobody answers, or the key is refused."""
    users = build_interactions(config).by_name.items()
    asked = [("data.reward judge", judge.chat) for judge in judges_of(load_rewards(config))]
    asked += [(f"the interaction {name}", user.chat) for name, user in users if isinstance(user, ModelUser)]
    for what, chat in asked:
        if isinstance(chat, OpenAIChat):
            try:
                chat.call()
            except ServerError as fault:
                raise ConfigError(f"{what}: {fault}") from fault


def say_shared_prompts(config: AgenticConfig) -> None:
    """Warns if validation prompts are also prompts of training."""
    if _splits_with_rows(config) != [*_SPLITS]:
        return
    prompts = [{json.dumps(row.payload[config.data.prompt_key]) for _, row in load_rows(config, split)} for split in _SPLITS]
    if shared := len(prompts[0] & prompts[1]):
        logger.warning("data.val_files: %d of %d prompts are in data.train_files too", shared, len(prompts[1]))


def build_row_agent(config: AgenticConfig, split: Split, name: str, event_loop: WatchedRunner) -> AgentLoop:
    """The agent that rows call `name`. Its constructor gets the arguments in `agent.agent_config_path` and, if it has such
    parameters, `settings` and the `offered_parts`. Raises ConfigError if it requires more, or doesn't know an argument."""
    own = _own_loops(config).get(name)
    found = load_class(own.target if own else AGENTS.get(name) or name, "the agent", ConfigError)
    agent, max_new_tokens = config.agent, config.max_new_tokens(split, ROWS_TAG)
    arguments = (own.model_extra or {}) if own else {}
    offered: dict[str, Any] = {
        "settings": RowAgentSettings(config.data.prompt_key, max_new_tokens, agent.max_assistant_turns, agent.max_user_turns),
        **offered_parts(config, split, event_loop.watchdog, event_loop.stopwatch),
        **arguments,
    }
    hint = "an agent that plays an environment is the agent_name of its tag in custom_envs"
    parts = asked_parts(named_parameters(found), offered, f"the agent {name}", hint)
    if unknown := [key for key in arguments if key not in parts]:
        raise ConfigError(f"agent.agent_config_path {agent.agent_config_path}: {unknown[0]} isn't a parameter of {name}")
    return make_agent(f"the agent {name}", partial(found, **parts))
