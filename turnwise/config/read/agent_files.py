"""Reads the files that a config's section `agent` names: tools, simulated users, agent loops. Their form is
verl's."""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from turnwise.config.problems import Problem, config_error
from turnwise.config.read.yaml_text import load_yaml, read_yaml
from turnwise.config.schema.section import Name, PositiveCount, Seconds, Section, is_entry_point
from turnwise.errors import ConfigError, nearest
from turnwise.model_files.hub import local_path
from turnwise.spec import AGENT_ALIASES, AGENTS, INTERACTION_ALIASES, INTERACTIONS, TOOL_ALIASES, TOOLS

S = TypeVar("S", bound=Section)


def _entry_point(registry: Mapping[str, str], aliases: Mapping[str, str], name: Any) -> Any:
    """A name in the registry or the one that an alias stands for; else the name as `module:Class`, even if
    written `module.Class`."""
    if not isinstance(name, str) or name in registry:
        return name
    if name in aliases:
        return aliases[name]
    entry = name
    if ":" not in name:
        module, _, attribute = name.rpartition(".")
        entry = f"{module}:{attribute}"
    if not is_entry_point(entry):
        names = ", ".join(registry)
        raise ValueError(f"{name!r} isn't one of {names}, nor module:Class.{nearest(name, registry)}")
    return entry


LoopTarget = Annotated[Name, BeforeValidator(partial(_entry_point, AGENTS, AGENT_ALIASES))]
Target = Annotated[Name, BeforeValidator(partial(_entry_point, TOOLS, TOOL_ALIASES))]


class ToolEntry(Section):
    """One entry of a tool file: a tool, or an MCP server with several tools."""

    class_name: Target
    config: dict[str, Any] = Field(default_factory=dict)
    tool_schema: dict[str, Any] | None = None
    timeout_s: Seconds | None = None
    max_concurrency: PositiveCount | None = None


class _ToolFile(Section):
    tools: list[ToolEntry]


class InteractionEntry(Section):
    """One simulated user of an interaction file: the name by which rows choose it, its class, and the class's
    config."""

    name: Name
    class_name: Annotated[Name, BeforeValidator(partial(_entry_point, INTERACTIONS, INTERACTION_ALIASES))]
    config: dict[str, Any] = Field(default_factory=dict)


class _InteractionFile(Section):
    interaction: list[InteractionEntry]


class LoopEntry(Section):
    """One of the user's own agent loops: the name by which rows choose it, its class, and the class's
    arguments."""

    model_config = ConfigDict(extra="allow")

    name: Name
    target: LoopTarget = Field(alias="_target_")


class _LoopFile(Section):
    loops: list[LoopEntry]


def read_tool_file(path: str) -> list[ToolEntry]:
    """Reads the tools of the file `agent.tool_config_path`. Raises ConfigError, which names file and key, for
    a wrong file."""
    form = "tools, a list of {class_name, config, tool_schema}"
    return _read("tool_config_path", path, _ToolFile, form).tools


def read_interaction_file(path: str) -> list[InteractionEntry]:
    """The simulated users of the file that `agent.interaction_config_path` names. Raises ConfigError like
    `read_tool_file`."""
    form = "interaction, a list of {name, class_name, config}"
    return _read("interaction_config_path", path, _InteractionFile, form).interaction


def read_loop_file(path: str) -> dict[str, LoopEntry]:
    """The loops of the file that `agent.agent_config_path` names, by name. Raises ConfigError like
    `read_tool_file`."""
    form = "a list of {name, _target_}"
    loops = _read("agent_config_path", path, _LoopFile, form).loops
    return {loop.name: loop for loop in loops}


def _read(key: str, path: str, kind: type[S], form: str) -> S:
    name = f"agent.{key} {path}"
    content = load_yaml(read_yaml(local_path(path), name), name)
    if kind is _LoopFile:
        content = {"loops": content}
    if kind is _ToolFile:
        mcp_key = _mcp_key(content)
        if mcp_key:
            raise ConfigError(f"{name} has the key {mcp_key}; an MCP server is one of the tools: {_MCP_FORM}")
    values = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(value, list) for value in values):
        raise ConfigError(f"{name} holds {str(content)[:40]!r}; expected {form}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    problems = [Problem(item["loc"], f"{_sentence(kind, item)}; expected {form}") for item in faults]
    raise config_error(name, problems, lambda path: "")


_MCP_FORM = "{class_name: mcp, config: {command: [program, word]}}, or config: {url: …}"


def _mcp_key(content: Any) -> str:
    """The first key of a tool file, or of one of its entries, under which other programs keep MCP servers; ""
    if none."""
    if not isinstance(content, dict):
        return ""
    sections = [content]
    entries = content.get("tools")
    if isinstance(entries, list):
        sections += [entry for entry in entries if isinstance(entry, dict)]
    for key in chain.from_iterable(sections):
        if str(key).lower().replace("_", "") in ("mcp", "mcpserver", "mcpservers"):
            return str(key)
    return ""


def _sentence(kind: type[Section], item: ErrorDetails) -> str:
    if item["type"] != "extra_forbidden":
        return item["msg"].removeprefix("Value error, ")
    [entries] = kind.model_fields.values()
    section: type[Section] = kind
    if len(item["loc"]) > 1:
        [section] = get_args(entries.annotation)
    names = list(section.model_fields)
    return f"unknown key; the known ones are {', '.join(names)}.{nearest(str(item['loc'][-1]), names)}"
