"""Reads the rows that a config's `data` section names, and checks them against the agents, tools and rewards
that play them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.rendering import Tools
from turnwise.config import AgenticConfig
from turnwise.config.read.agent_files import LoopEntry, read_loop_file
from turnwise.data.bad_rows import BadRows
from turnwise.data.demonstrations import message_problem
from turnwise.data.forms import as_task, form_hint, form_of
from turnwise.data.prompts import has_calls, has_messages, with_plain_messages
from turnwise.data.reward_functions import FunctionReward
from turnwise.data.rewards import WeightedReward
from turnwise.data.tables import TableRow, read_tables
from turnwise.errors import DataError, NotAvailableError, nearest
from turnwise.examine.prompts import continued_problem
from turnwise.examine.tools import agent_name, check_tools_of_rows, check_users_of_rows
from turnwise.rollout.tasks import DataRow
from turnwise.spec import AGENTS, ROWS_TAG
from turnwise.tools.tool_box import Interactions, ToolBox
from turnwise.types import Split

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a split, each with its place for error messages."""

    files: str
    """The setting that names their files."""
    rows: Sequence[tuple[str, DataRow]]
    bad: BadRows
    """Rows of the wrong shape, which `data.on_bad_row: skip` leaves out."""

    def agents(self) -> dict[str, str]:
        """The names of the rows' agents, each with the place of the first row that it plays."""
        places: dict[str, str] = {}
        for place, row in self.rows:
            places.setdefault(row.agent, place)
        return places

    def say_left_out(self) -> None:
        """Warns of the rows that are left out."""
        self.bad.leave_out(self.files, len(self.rows) + len(self.bad.sentences))


@dataclass(frozen=True, slots=True)
class RowParts:
    """What rows are checked against: the tools, users, rewards and agent loops that the config names."""

    tools: ToolBox
    users: Interactions
    rewards: Sequence[WeightedReward]
    loops: Mapping[str, LoopEntry]


def files_of(config: AgenticConfig, split: Split) -> list[str]:
    """The names of a split's sources of rows."""
    return (config.data.train_files if split == "train" else config.data.val_files) or []


def splits_with_rows(config: AgenticConfig) -> list[Split]:
    """The splits that this config plays and that have rows of data sets among their tasks."""
    return [
        split
        for split in SPLITS
        if config.env_manager(split).has_rows and (split == "train" or config.uses_validation)
    ]


def read_rows(config: AgenticConfig, split: Split, parts: RowParts) -> Rows:
    """Reads and checks the rows of a split. A row's column `data_source` is the tag under which metrics count
    it; without one the tag is `data`. Raises DataError if a row lacks something that its agent, tools or
    rewards need, if rows have the wrong shape that `data.on_bad_row` doesn't skip, or if none is left."""
    key = f"data.{split}_files"
    bad = BadRows()
    functions = [weighted.reward for weighted in parts.rewards if isinstance(weighted.reward, FunctionReward)]
    tables: list[TableRow] = []
    for row in _plain_rows(config, read_tables(files_of(config, split), key, bad), parts.tools.schemas, bad):
        try:
            _check_shape(config, row, functions)
        except DataError as fault:
            bad.add(str(fault))
        else:
            tables.append(row)
    if config.data.on_bad_row == "error":
        bad.refuse()
    elif not tables:
        bad.leave_out(key, len(bad.sentences))
    rows: list[tuple[str, DataRow]] = []
    for row in tables:
        source = row.columns.get("data_source")
        tag = source if isinstance(source, str) and source else ROWS_TAG
        rows.append((row.place, DataRow(tag, _agent_of(config, row, parts.loops), row.columns)))
    check_tools_of_rows(config, parts.tools, tables)
    check_users_of_rows(config, parts.users.by_name, tables)
    return Rows(key, rows, bad)


def _plain_rows(
    config: AgenticConfig, tables: Sequence[TableRow], schemas: Tools, bad: BadRows
) -> Iterator[TableRow]:
    """Yields the rows with their prompt in the form of `data.format`, and their messages without what tables
    pad them with."""
    data = config.data
    for row in tables:
        columns = row.columns
        if data.format is not None:
            try:
                columns = as_task(columns, data.format, data.prompt_key)
            except DataError as fault:
                bad.add(f"{row.place}: {fault}")
                continue
        if has_calls(columns):
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
            f"{row.place}: there is no column {key!r}; it has {', '.join(row.columns) or 'none'}. "
            f"data.prompt_key names the "
            f"column of the prompt.{hint}{form}"
        )
    if problem := _prompt_problem(row.columns[key]):
        raise DataError(f"{row.place}: column {key!r} {problem}; a prompt is a string or a list of messages")
    for reward in rewards:
        try:
            reward.check([row])
        except DataError as fault:
            has_form = config.data.format is None and form_of(row.columns) is not None
            form = form_hint(row.columns) if has_form else ""
            raise DataError(f"{fault}.{form}" if form else str(fault)) from fault


def _prompt_problem(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "" if prompt.strip() else "is empty"
    if not isinstance(prompt, list) or not prompt:
        return f"is {str(prompt)[:40]!r}"
    if problem := next(
        filter(None, (message_problem(index, message) for index, message in enumerate(prompt))), ""
    ):
        return problem
    return continued_problem(prompt)


def read_loops(config: AgenticConfig) -> Mapping[str, LoopEntry]:
    """The agent loops of `agent.agent_config_path`, by name."""
    path = config.agent.agent_config_path
    return read_loop_file(path) if path else {}


def _agent_of(config: AgenticConfig, row: TableRow, loops: Mapping[str, LoopEntry]) -> str:
    name = agent_name(config, row)
    if name in loops or AGENTS.get(name) or ":" in name:
        return name
    known = ", ".join([*(agent for agent, target in AGENTS.items() if target), *loops])
    if name in AGENTS:
        raise NotAvailableError(f"{row.place}: the agent {name} isn't in this version, which has {known}")
    raise DataError(
        f"{row.place}: agent {name!r} isn't one of {known}, nor module:Class.{nearest(name, AGENTS)}"
    )
