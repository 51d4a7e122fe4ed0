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
from turnwise.spec import AGENT_ALIASES, INTERACTIONS, ROW_AGENTS, TOOLS
from turnwise.tools.function_tool import FunctionTool
from turnwise.tools.mcp_server import McpServer
from turnwise.tools.tool_box import Interactions, OfferedTool, ToolBox, interaction_kwargs


def make_tools(config: AgenticConfig, notes: list[str]) -> ToolBox:
    """The tools of `agent.tools`, `agent.tool_config_path` and `agent.function_tool_path`. Appends to `notes`
    why a function or a server's tool is left out. Raises TurnwiseError if a tool can't be made."""
    agent = config.agent
    key = f"class_name of {agent.tool_config_path}"
    entries = read_tool_file(agent.tool_config_path) if agent.tool_config_path else []
    tools: list[OfferedTool] = []
    for name in agent.tools:
        tools += _of_entry(ToolEntry(class_name=name), "agent.tools", notes)
    for entry in entries:
        tools += _of_entry(entry, key, notes)
    if agent.function_tool_path:
        tools += [
            OfferedTool(FunctionTool(function)) for function in _functions(agent.function_tool_path, notes)
        ]
    return ToolBox(tools, agent.tool_timeout_s)


def _of_entry(entry: ToolEntry, key: str, notes: list[str]) -> list[OfferedTool]:
    found = load_object(TOOLS.get(entry.class_name) or entry.class_name, key, ConfigError)
    make: Callable[[], Tool | McpServer]
    if isinstance(found, type):
        _check_class(found, f"{key} {entry.class_name}")
        make = partial(found, entry.config, entry.tool_schema)
    elif isinstance(found, Tool):
        make = partial(_as_it_is, found)
    elif not callable(found):
        raise ConfigError(
            f"{key} {entry.class_name} is a {type(found).__name__}; a tool is a function, or a class or "
            f"object with schema, "
            "create, execute, calc_reward and release"
        )
    elif entry.config:
        raise ConfigError(f"{key} {entry.class_name} is a function, which takes no config; leave config out")
    else:
        make = partial(FunctionTool, found, entry.tool_schema)
    with Foreign(f"{key} {entry.class_name}: making it", "at the start", are_faults=True):
        made = make()
    if isinstance(made, McpServer):
        return _of_server(made, entry, notes)
    return [OfferedTool(_checked(made, f"{key} {entry.class_name}"), entry.timeout_s, entry.max_concurrency)]


def _check_class(tool: type, what: str) -> None:
    """Raises ConfigError for a class that isn't a tool's, or isn't made with the config and schema of a tool
    file."""
    if issubclass(tool, McpServer):
        return
    match tool:
        case object(execute=_):
            pass
        case _:
            raise ConfigError(
                f"{what} is a class without the method execute; a tool is a function, a method of an "
                f"object, or a class or "
                "object with schema, create, execute, calc_reward and release"
            )
    try:
        inspect.signature(tool).bind({}, None)
    except TypeError as fault:
        raise ConfigError(
            f"{what}: a tool's class is made with (config, tool_schema), and {tool.__name__} isn't "
            f"({fault}); give an object "
            "of it, or let its __init__ take both"
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
                raise ConfigError(f"mcp: {fault}; config.tools names it: leave it out there") from fault
            problems.append(str(fault))
            notes.append(f"mcp: the tool {tool.name} is left out: {fault}")
    if problems and not offered:
        raise ConfigError(f"mcp: the server has no tool that can be called: {'; '.join(problems)}")
    return offered


def _as_it_is(tool: Tool) -> Tool:
    return tool


def _checked(tool: Tool, what: str) -> Tool:
    lacking = [
        name for name in ("schema", "create", "execute", "calc_reward", "release") if not hasattr(tool, name)
    ]
    if lacking:
        raise ConfigError(f"{what} has no {', '.join(lacking)}; see Tool in turnwise/protocols/tools.py")
    if not isinstance(tool.schema, Mapping):
        raise ConfigError(f"{what}: its schema is a {type(tool.schema).__name__}, and tool_schema is unset")
    return tool


def _functions(path: str, notes: list[str]) -> Sequence[Callable[..., Any]]:
    """The public functions that a Python file describes, in the file's order. Imports the file as a module of
    its own."""
    file, key = local_path(path), f"agent.function_tool_path {path}"
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
        lacking = (
            f": {', '.join(function.__name__ for function in functions)} has no docstring"
            if functions
            else ""
        )
        raise ConfigError(
            f"{key} defines no public function{lacking}; each public function of that file is a tool"
        )
    for function in functions:
        if function not in tools:
            notes.append(
                f"{key}: the function {function.__name__} isn't a tool, since it has no docstring, or is a "
                f"generator"
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
    path, users = config.agent.interaction_config_path, dict[str, Interaction]()
    for entry in read_interaction_file(path) if path else []:
        key = f"interaction {entry.name} of {path}"
        if entry.name in users:
            raise ConfigError(
                f"{key}: two interactions have this name; rows choose by it, so rename one of them"
            )
        found = load_class(
            INTERACTIONS.get(entry.class_name) or entry.class_name, f"{key}: class_name", ConfigError
        )
        try:
            with Foreign(f"{key}: making it", "at the start", are_faults=True):
                user = found({**entry.config, "name": entry.name})
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
    name = str(row.columns.get(config.data.agent_name_key) or config.data.default_agent)
    return AGENT_ALIASES.get(name, name)


def check_users_of_rows(
    config: AgenticConfig, users: Mapping[str, Interaction], rows: Sequence[TableRow]
) -> None:
    """Raises DataError for an unknown user, wrong arguments or, if there are users, a built-in agent's row
    that names none."""
    names = list(users)
    for row in rows:
        name = interaction_kwargs(row.columns).get("name")
        if name is not None and name not in names:
            known = (
                f"there are {', '.join(names)}"
                if names
                else "agent.interaction_config_path names no file of them"
            )
            raise DataError(
                f"{row.place}: extra_info names the interaction {name!r}; {known}.{nearest(str(name), names)}"
            )
        if name is None and names and agent_name(config, row) in ROW_AGENTS:
            raise DataError(
                f"{row.place}: the interactions {', '.join(names)} are configured, and this row would be "
                f"played without them: "
                "give it the column extra_info.interaction_kwargs.name"
            )
        calls = (
            ((users[name].start_interaction, 1), (users[name].generate_response, 2))
            if name is not None
            else ()
        )
        for method, num_given in calls:
            try:
                inspect.signature(method).bind(*[None] * num_given, **interaction_kwargs(row.columns))
            except TypeError as fault:
                what = f"the columns extra_info.interaction_kwargs don't fit the interaction {name!r}"
                raise DataError(f"{row.place}: {what} ({method.__name__}: {fault})") from fault


def check_tools_of_rows(config: AgenticConfig, box: ToolBox, rows: Sequence[TableRow]) -> None:
    """Raises DataError if a row names a missing tool, lacks a tool's columns, or has an agent that doesn't
    fit the tools."""
    data, path = config.data, config.agent.tool_config_path
    names = box.names
    for row in rows:
        if names and not row.columns.get(data.agent_name_key) and not data.is_set("default_agent"):
            raise DataError(
                f"{row.place}: the tools {', '.join(names)} are configured, and this row would be played "
                f"without them: give it "
                f"the column {data.agent_name_key} (tool_agent), or set data.default_agent: tool_agent"
            )
        if agent_name(config, row) != "tool_agent":
            continue
        if not names:
            what = (
                f"{path} (agent.tool_config_path) names none"
                if path
                else "set agent.tools, tool_config_path or function_tool_path"
            )
            raise DataError(f"{row.place}: tool_agent has no tools; {what}")
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
    found = extra if isinstance(extra, Mapping) else {"tool_selection": extra}
    kwargs, selection = found.get("tools_kwargs") or {}, found.get("tool_selection") or []
    given = list(kwargs.values()) if isinstance(kwargs, Mapping) else [kwargs]
    if (
        found is not extra
        or not isinstance(selection, list)
        or not all(isinstance(one, Mapping | None) for one in given)
    ):
        raise DataError(
            f"{row.place}: extra_info is {str(extra)[:80]}; with tools it may hold tools_kwargs (mappings "
            f"by tool name) "
            "and tool_selection (a list of names)"
        )
    return [*(name for name, one in kwargs.items() if one is not None), *selection]
