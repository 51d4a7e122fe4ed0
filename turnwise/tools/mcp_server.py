"""The registered tool `mcp`: the tools of an MCP server (Model Context Protocol), called through the official
client."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any

from turnwise.errors import ConfigError, EnvironmentFault, NotAvailableError, ToolError, install_hint, nearest
from turnwise.runtime.threads import DaemonThread
from turnwise.tools.function_tool import StatelessTool, check_keys
from turnwise.tools.mcp_messages import readable
from turnwise.tools.mcp_result import text_of

CONNECT_S = 60.0
"""Seconds within which a server must start and list its tools."""
KEYS = {"command": list, "url": str, "env": dict, "headers": dict, "tools": list}
INVALID_PARAMS = -32602
NO_CONNECTION = (-32000, -32600, -32700)
"""Codes of a closed connection, of an ended session, and of an answer that can't be read."""


class McpServer:
    """The tools of one server. A tool file names an McpServer like a single tool; iterating over it yields
    the offered tools.

    Its config has `command`, the words that start a server on stdin and stdout (with `env`, variables of its
    environment), or `url`, the address of a server on streamable HTTP (with `headers`). `tools` names the
    tools to offer; without it all are offered. Raises ConfigError if there is a `tool_schema`, or the config
    has another key, a value of the wrong type, both or neither of `command` and `url`, or in `tools` a name
    that the server lacks; NotAvailableError if the server doesn't answer, or the client isn't installed."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None) -> None:
        check_keys("mcp", config, KEYS)
        for key, value in config.items():
            kind = KEYS[key]
            if not isinstance(value, kind) or not value or not _has_only_texts(value):
                form = "string" if kind is str else f"{kind.__name__} of strings"
                raise ConfigError(f"mcp: config.{key} is {value!r}; it must be a {form}")
        if ("command" in config) == ("url" in config):
            raise ConfigError("mcp: config has command, a list of words, or url; give one of them")
        if tool_schema:
            raise ConfigError("mcp: the server says what its tools' schemas are; remove tool_schema")
        settings = {key: config[key] for key in KEYS if key in config and key != "tools"}
        self._connection = _connected(json.dumps(settings))
        tools = {tool.name: tool for tool in self._connection.tools}
        for name in config.get("tools", ()):
            if name not in tools:
                raise ConfigError(
                    f"mcp: config.tools names {name!r}; the server has "
                    f"{', '.join(tools)}.{nearest(name, tools)}"
                )
        names = config.get("tools", tools)
        self._tools = [McpTool(self._connection, tools[name]) for name in names]

    def __iter__(self) -> "Iterator[McpTool]":
        return iter(self._tools)


class McpTool(StatelessTool):
    """A tool of a server. If the tool itself fails, the model reads its error. If the server fails, so does
    the episode."""

    def __init__(self, connection: "_Connection", tool: Any) -> None:
        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        self.schema: Mapping[str, Any] = {"type": "function", "function": function}
        self.name = str(tool.name)
        self._connection = connection

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str:
        call = self._connection.call(self.name, dict(arguments))
        result = await asyncio.wrap_future(self._connection.start(call))
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed and doesn't say why")
        return text


class _Connection:
    """Keeps a client open across episodes, on an event loop and a thread of its own. The asyncio task that
    opens a client also closes it. After the connection is lost, the next call opens a new client."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._holder: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] = self._loop.create_future()
        self._is_lost = asyncio.Event()
        DaemonThread("mcp").start(self._loop.run_forever)
        listed = self.start(self._listed())
        try:
            self.tools = listed.result(CONNECT_S)
        except TimeoutError as fault:
            listed.cancel()
            if self._holder:
                self._loop.call_soon_threadsafe(self._holder.cancel)
            raise NotAvailableError(
                f"the MCP server {self} didn't name its tools within {CONNECT_S:g} s"
            ) from fault

    def __str__(self) -> str:
        return str(self._settings.get("url") or " ".join(self._settings["command"]))

    def start(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        client = await self._connected()
        is_lost = self._is_lost  # of this client: meanwhile there may be another one
        from mcp import MCPError

        try:
            return await client.call_tool(name, arguments)
        except MCPError as fault:
            if fault.code == INVALID_PARAMS:
                raise ToolError(str(fault)) from fault
            if fault.code in NO_CONNECTION:
                is_lost.set()
            raise EnvironmentFault(f"the MCP server {self} failed in a call of {name}: {fault}") from fault
        except ValueError as fault:
            # It isn't the model's mistake, as ValueErrors of tools are.
            problem = f"its answer isn't in the protocol's form ({str(fault).splitlines()[0]})"
            raise EnvironmentFault(f"the MCP server {self} failed in a call of {name}: {problem}") from fault

    async def _listed(self) -> list[Any]:
        client = await self._connected()
        tools: list[Any] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def _connected(self) -> Any:
        if self._holder is None or self._holder.done() or self._is_lost.is_set():
            self._client = self._loop.create_future()
            self._is_lost = asyncio.Event()
            holding = self._hold(self._client, self._is_lost)
            self._holder = self._loop.create_task(holding, name=f"MCP server {self}")
            # Otherwise asyncio logs the exception.
            self._holder.add_done_callback(lambda holder: holder.cancelled() or holder.exception())
        holder = self._holder
        await asyncio.wait([holder, self._client], return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            raise NotAvailableError(f"the MCP server {self} can't be reached: {_cause(holder.exception())}")
        return self._client.result()

    async def _hold(self, client: asyncio.Future[Any], is_lost: asyncio.Event) -> None:
        from mcp import Client, StdioServerParameters, types
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with AsyncExitStack() as stack:
            if "url" in self._settings:
                headers = self._settings.get("headers")
                http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
                server: Any = streamable_http_client(self._settings["url"], http_client=http)
            else:
                command, *words = self._settings["command"]
                environment = self._settings.get("env")
                program = StdioServerParameters(command=command, args=words, env=environment)
                # Bytes that aren't UTF-8 would end the reader, and all later calls would wait for nothing.
                program.encoding_error_handler = "replace"
                server = stdio_client(program)
            open_client = await stack.enter_async_context(Client(readable(server, types)))
            client.set_result(open_client)
            await is_lost.wait()


def _has_only_texts(value: Any) -> bool:
    texts = [value]
    if isinstance(value, dict):
        texts = [*value, *value.values()]
    elif not isinstance(value, str):
        texts = value
    return all(isinstance(text, str) for text in texts)


def _cause(fault: BaseException | None) -> str:
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    if fault is None:
        return "it closed the connection"
    return f"{type(fault).__name__}: {fault}"


@lru_cache(maxsize=8)
def _connected(settings: str) -> _Connection:
    """The connection to a server. It is cached: a `Trainer` examines its config at each call, and one server
    is enough."""
    try:
        import mcp  # noqa: F401
    except ImportError as fault:
        raise NotAvailableError(
            f"mcp needs the client mcp, which isn't installed; {install_hint('tools')}"
        ) from fault
    return _Connection(json.loads(settings))
