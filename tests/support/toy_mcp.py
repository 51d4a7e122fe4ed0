"""A server of the model context protocol, on stdin and stdout where it is run as a program."""

from __future__ import annotations

import asyncio
import os
from typing import Any


def make_server() -> Any:
    from mcp import MCPError
    from mcp.server.mcpserver import Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("toy", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    def variable(key: str) -> str:
        return os.environ.get(key, "unset")

    @server.tool()
    def fail() -> str:
        raise ToolError("no such page")

    @server.tool()
    def picture() -> list:
        return ["a dot", Image(data=b"x", format="png")]

    @server.tool(structured_output=False)
    def misshapen(x: int) -> str:
        """Its schema is made wrong below."""
        return str(x)

    server._tool_manager.get_tool("misshapen").parameters["properties"]["x"]["type"] = "objekt"

    @server.tool()
    async def slow() -> str:
        await asyncio.sleep(100)
        return ""

    waiting, refused = asyncio.Event(), asyncio.Event()

    @server.tool()
    async def refuse() -> str:
        await waiting.wait()
        refused.set()
        raise MCPError(code=-32603, message="the quota is used up")

    @server.tool()
    async def wait() -> str:
        """Answers a while after a call of `refuse`, which waits for it."""
        waiting.set()
        await refused.wait()
        await asyncio.sleep(0.5)
        return "waited"

    @server.tool()
    def end() -> str:
        os._exit(3)

    return server


if __name__ == "__main__":
    make_server().run()
