"""Makes the tools and simulated users that a config names, and checks whether rows fit them."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from turnwise.config import AgenticConfig
from turnwise.config.read.agent_files import ToolEntry, read_interaction_file, read_tool_file
from turnwise.data.tables import TableRow
from turnwise.errors import ConfigError, DataError, nearest
from turnwise.model_files.hub import local_path
from turnwise.protocols import ChecksRows, Interaction, Tool
from turnwise.runtime.entry_points import load_class, load_object
from turnwise.runtime.foreign import Foreign
from turnwise.spec import AGENT_ALIASES, INTERACTIONS, ROW_AGENTS, TOOL_AGENTS, TOOLS
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.interactions import Interactions, interaction_kwargs
from turnwise.tools.mcp_server import McpServer
from turnwise.tools.tool_box import OfferedTool, ToolBox

_TOOL_PARTS = ("schema", "create", "execute", "calc_reward", "release")


def make_tools(config: AgenticConfig, notes: list[str]) -> ToolBox:
    """The tools of `agent.tools`, `agent.tool_config_path` and `agent.function_tool_path`. Appends to `notes`
    why a function or a server's tool is left out. Raises TurnwiseError if a tool can't be made."""
    agent = config.agent
    key = f"class_name of {agent.tool_config_path}"
    entries: Sequence[ToolEntry] = ()
    if agent.tool_config_path:
        entries = read_tool_file(agent.tool_config_path)
    tools: list[OfferedTool] = []
    for name in agent.tools:
        tools += _of_entry(ToolEntry(class_name=name), "agent.tools", notes)
    for entry in entries:
        tools += _of_entry(entry, key, notes)
    if agent.function_tool_path:
        functions = _functions(agent.function_tool_path, notes)
        tools += [OfferedTool(FunctionTool(function)) for function in functions]
    return ToolBox(tools, agent.tool_timeout_s)


def _of_entry(entry: ToolEntry, key: str, notes: list[str]) -> list[OfferedTool]:
    label = f"{key} {entry.class_name}"
    value = load_object(TOOLS.get(entry.class_name) or entry.class_name, key, ConfigError)
    make: Callable[[], Tool | McpServer]
    if isinstance(value, type):
        _check_class(value, label)
        make = partial(value, entry.config, entry.tool_schema)
    elif isinstance(value, Tool):
        make = partial(_as_it_is, value)
    elif not callable(value):
        raise ConfigError(
            f"{label} is a {type(value).__name__}; a tool is a function, or a class or "
            "object with schema, create, execute, calc_reward and release"
        )
    elif entry.config:
        raise ConfigError(f"{label} is a function, which takes no config; remove config")
    else:
        make = partial(FunctionTool, value, entry.tool_schema)
    with Foreign(f"{label}: making it", "at the start", are_faults=True):
        made = make()
    if isinstance(made, McpServer):
        return _of_server(made, entry, notes)
    tool = _checked(made, label)
    return [OfferedTool(tool, entry.timeout_s, entry.max_concurrency)]


def _check_class(tool: type, label: str) -> None:
    """Raises ConfigError for a class that isn't a tool's, or isn't made with the config and schema of a tool
    file."""
    if issubclass(tool, McpServer):
        return
    match tool:
        case object(execute=_):
            pass
        case _:
            raise ConfigError(
                f"{label} is a class without the method execute; a tool is a function, a method of an "
                "object, or a class or object with schema, create, execute, calc_reward and release"
            )
    try:
        inspect.signature(tool).bind({}, None)
    except TypeError as fault:
        raise ConfigError(
            f"{label}: a tool's class is made with (config, tool_schema), and {tool.__name__} isn't "
            f"({fault}); give an object of it, or let its __init__ take both"
        ) from fault
    except ValueError:  # a class in C has no signature
        return


def _of_server(server: McpServer, entry: ToolEntry, notes: list[str]) -> list[OfferedTool]:
    """The tools of a server. One whose schema is wrong is left out, which `notes` says, unless `config.tools`
    names it. Raises ConfigError if none is left."""
    offered: list[OfferedTool] = []
    problems: list[str] = []
    for tool in server:
        try:
            offered.append(OfferedTool(tool, entry.timeout_s, entry.max_concurrency))
        except ConfigError as fault:
            if "tools" in entry.config:
                raise ConfigError(f"mcp: {fault}; config.tools names it: remove it there") from fault
            problems.append(str(fault))
            notes.append(f"mcp: the tool {tool.name} is left out: {fault}")
    if problems and not offered:
        raise ConfigError(f"mcp: the server has no tool that can be called: {'; '.join(problems)}")
    return offered


def _as_it_is(tool: Tool) -> Tool:
    return tool


def _checked(tool: Tool, label: str) -> Tool:
    lacking = [name for name in _TOOL_PARTS if not hasattr(tool, name)]
    if lacking:
        raise ConfigError(f"{label} has no {', '.join(lacking)}; see Tool in turnwise/protocols/tools.py")
    if not isinstance(tool.schema, Mapping):
        raise ConfigError(f"{label}: its schema is a {type(tool.schema).__name__}, and tool_schema is unset")
    return tool


def _functions(path: str, notes: list[str]) -> Sequence[Callable[..., Any]]:
    """The public functions that a Python file describes, in the file's order. Imports the file as a module of
    its own."""
    file = local_path(path)
    key = f"agent.function_tool_path {path}"
    name = f"turnwise_functions_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{key} isn't a Python file; name one whose public functions are tools")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with Foreign(f"{key}: importing it", "at the start", are_faults=True):
        spec.loader.exec_module(module)
    functions = [function for function in _public(module) if function.__module__ == name]
    tools = [function for function in functions if not _is_helper(function, module)]
    if not tools:
        lacking = ""
        if functions:
            names = ", ".join(function.__name__ for function in functions)
            lacking = f": {names} has no docstring"
        raise ConfigError(
            f"{key} defines no public function{lacking}; each public function of that file is a tool"
        )
    for function in functions:
        if function not in tools:
            notes.append(
                f"{key}: the function {function.__name__} isn't a tool, since it has no docstring, or is a "
                "generator"
            )
    return tools


def _public(module: ModuleType) -> list[FunctionType]:
    """The functions that `__all__` names; without it, those whose names don't begin with an underscore. Each
    once."""
    names = vars(module).get("__all__")
    if names is None:
        names = [name for name in vars(module) if not name.startswith("_")]
    values = [vars(module).get(name) for name in names]
    return list(dict.fromkeys(value for value in values if isinstance(value, FunctionType)))


def _is_helper(function: FunctionType, module: ModuleType) -> bool:
    """Whether a public function is only used by tools: it has no docstring, or it is a context manager or
    generator."""
    if function.__name__ in vars(module).get("__all__", ()):
        return False
    inner = inspect.unwrap(function)
    is_generator = inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)
    return is_generator or not inspect.getdoc(function)


def make_users(config: AgenticConfig) -> Interactions:
    """The simulated users of `agent.interaction_config_path`, if it is set. Raises TurnwiseError if one can't
    be made."""
    users: dict[str, Interaction] = {}
    path = config.agent.interaction_config_path
    entries = read_interaction_file(path) if path else []
    for entry in entries:
        key = f"interaction {entry.name} of {path}"
        if entry.name in users:
            raise ConfigError(
                f"{key}: two interactions have this name; rows choose by it, so rename one of them"
            )
        target = INTERACTIONS.get(entry.class_name) or entry.class_name
        make = load_class(target, f"{key}: class_name", ConfigError)
        try:
            with Foreign(f"{key}: making it", "at the start", are_faults=True):
                user = make({**entry.config, "name": entry.name})
        except ConfigError as fault:
            raise ConfigError(f"{key}: {fault}") from fault
        if not isinstance(user, Interaction):
            raise ConfigError(
                f"{key}: {entry.class_name} lacks a method of Interaction in turnwise/protocols/tools.py"
            )
        users[entry.name] = user
    return Interactions(users, config.agent.tool_timeout_s)


def agent_name(config: AgenticConfig, row: TableRow) -> str:
    """The name of a row's agent, by default `data.default_agent`. An alias is replaced by the name that it
    stands for."""
    column = row.columns.get(config.data.agent_name_key)
    name = str(column or config.data.default_agent)
    return AGENT_ALIASES.get(name, name)


def check_users_of_rows(
    config: AgenticConfig, users: Mapping[str, Interaction], rows: Sequence[TableRow]
) -> None:
    """Raises DataError for an unknown user, wrong arguments or, if there are users, a built-in agent's row
    that names none."""
    names = list(users)
    for row in rows:
        name = interaction_kwargs(row.columns).get("name")
        if name is not None:
            if name not in names:
                available = "agent.interaction_config_path names no file of them"
                if names:
                    available = f"there are {', '.join(names)}"
                hint = nearest(str(name), names)
                raise DataError(f"{row.place}: extra_info names the interaction {name!r}; {available}.{hint}")
            _check_user_of_row(users[name], name, row)
        elif names and agent_name(config, row) in ROW_AGENTS:
            raise DataError(
                f"{row.place}: the interactions {', '.join(names)} are configured, and this row would be "
                "played without them: give it the column extra_info.interaction_kwargs.name"
            )


def _check_user_of_row(user: Interaction, name: str, row: TableRow) -> None:
    """Raises DataError if the methods of a user can't be called with the arguments of a row."""
    arguments = interaction_kwargs(row.columns)
    for method, positional in (
        (user.start_interaction, [None]),
        (user.generate_response, [None, None]),
    ):
        try:
            inspect.signature(method).bind(*positional, **arguments)
        except TypeError as fault:
            raise DataError(
                f"{row.place}: the columns extra_info.interaction_kwargs don't fit the interaction {name!r} "
                f"({method.__name__}: {fault})"
            ) from fault


def check_tools_of_rows(config: AgenticConfig, box: ToolBox, rows: Sequence[TableRow]) -> None:
    """Raises DataError if a row names a missing tool, lacks a tool's columns, or has an agent that doesn't
    fit the tools."""
    data = config.data
    path = config.agent.tool_config_path
    names = box.names
    needs_agent = bool(names) and not data.is_set("default_agent")
    for row in rows:
        if needs_agent and not row.columns.get(data.agent_name_key):
            raise DataError(
                f"{row.place}: the tools {', '.join(names)} are configured, and this row would be played "
                f"without them: give it the column {data.agent_name_key} (tool_agent), or set "
                "data.default_agent: tool_agent"
            )
        agent = agent_name(config, row)
        if agent not in TOOL_AGENTS:
            continue
        if not names and agent == "tool_agent":
            hint = "set agent.tools, tool_config_path or function_tool_path"
            if path:
                hint = f"{path} (agent.tool_config_path) names none"
            raise DataError(f"{row.place}: tool_agent has no tools; {hint}")
        for name in _named_by(row):
            if name not in names:
                raise DataError(
                    f"{row.place}: extra_info names the tool {name!r}; there are {', '.join(names)}"
                )
        for offered in box.select(row.columns):
            if isinstance(offered.tool, ChecksRows):
                row.check(f"the tool {offered.name}", offered.tool, row.columns)


def _named_by(row: TableRow) -> list[str]:
    """The names of tools in a row's `extra_info`. Raises DataError if `extra_info` has a wrong form."""
    extra = row.columns.get("extra_info") or {}
    if isinstance(extra, Mapping):
        kwargs = extra.get("tools_kwargs") or {}
        selection = extra.get("tool_selection") or []
        if _are_by_tool(kwargs) and isinstance(selection, list):
            called = [name for name, arguments in kwargs.items() if arguments is not None]
            return [*called, *selection]
    raise DataError(
        f"{row.place}: extra_info is {str(extra)[:80]}; with tools it may hold tools_kwargs (mappings by "
        "tool name) and tool_selection (a list of names)"
    )


def _are_by_tool(kwargs: Any) -> bool:
    """Whether they map names of tools to mappings of arguments."""
    if not isinstance(kwargs, Mapping):
        return False
    return all(isinstance(arguments, Mapping | None) for arguments in kwargs.values())
