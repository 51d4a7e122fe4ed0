"""Tools of MCP servers: one that is a program, and one in this process that speaks streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from messages import says
from toy_tools import called

from turnwise.config.read.agent_files import ToolEntry
from turnwise.errors import ConfigError, EnvironmentFault, NotAvailableError, ToolError
from turnwise.examine.tools import _of_entry
from turnwise.tools import mcp_server
from turnwise.tools.mcp_server import McpServer
from turnwise.tools.tool_box import ToolBox, ToolFault

PROGRAM = Path(__file__).parents[2] / "support" / "toy_mcp.py"
STDIO = {
    "command": [sys.executable, str(PROGRAM)],
    "env": {"TOY": "red", "PYTHONPATH": os.pathsep.join(sys.path)},
}


@pytest.fixture(scope="module")
def http():
    pytest.importorskip("mcp")
    import uvicorn
    from toy_mcp import make_server

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = uvicorn.Server(uvicorn.Config(make_server().streamable_http_app(), log_level="critical"))
        thread = threading.Thread(target=serving.run, args=([listening],))
        thread.start()
        yield {"url": f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", "headers": {"X-Key": "secret"}}
        serving.should_exit = serving.force_exit = True
        thread.join(30)


@pytest.fixture
def stdio():
    pytest.importorskip("mcp")
    return STDIO


@pytest.fixture(params=["stdio", "http"])
def config(request):
    return request.getfixturevalue(request.param)


def answer(config: dict, name: str, timeout_s: float | None = 60, **arguments) -> tuple[str, bool]:
    box = ToolBox(
        _of_entry(ToolEntry(class_name="mcp", config=config, timeout_s=timeout_s), "class_name", [])
    )
    text, is_error, _ = called(box, name, **arguments)[0]
    return text, is_error


def test_its_tools_have_the_schemas_of_the_server(config):
    schemas = {tool.schema["function"]["name"]: tool.schema["function"] for tool in McpServer(config, None)}
    assert list(schemas) == [
        "add",
        "variable",
        "fail",
        "picture",
        "misshapen",
        "slow",
        "refuse",
        "wait",
        "end",
    ]
    assert schemas["add"]["description"] == "Adds two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]


def test_calls_of_several_episodes_go_over_one_connection(config):
    async def main() -> list[str]:
        tools = {tool.schema["function"]["name"]: tool for tool in McpServer(config, None)}
        return await asyncio.gather(*(tools["add"].execute(None, {"a": n, "b": 1}) for n in range(20)))

    for _ in range(2):  # event loops come and go
        assert asyncio.run(main()) == [str(n + 1) for n in range(20)]


def test_mistakes_are_results(config):
    text, is_error = answer(config, "fail")
    assert is_error and text.startswith("Error executing 'fail': ") and "no such page" in text
    text, is_error = answer(config, "add", a="x", b=1)
    assert is_error and "Invalid arguments for 'add'" in text


def test_the_servers_own_check_of_arguments_is_a_mistake_too(config):
    (add,) = McpServer(config | {"tools": ["add"]}, None)
    with pytest.raises(ToolError, match="validation error"):
        asyncio.run(add.execute(None, {"a": "x"}))


def test_content_that_is_no_text_is_named(config):
    assert answer(config, "picture") == ("a dot\n[image left out: image/png, 1 bytes]", False)


def test_a_tool_with_a_wrong_schema_is_left_out_and_named(stdio):
    notes: list[str] = []
    offered = _of_entry(ToolEntry(class_name="mcp", config=stdio), "class_name", notes)
    names = [tool.name for tool in offered]
    assert "misshapen" not in names and {"add", "end"} <= set(names)
    assert "misshapen" in notes[0] and "objekt" in notes[0]
    with pytest.raises(ConfigError, match=r"misshapen.*config\.tools"):
        _of_entry(
            ToolEntry(class_name="mcp", config=stdio | {"tools": ["add", "misshapen"]}), "class_name", []
        )


def test_messages_that_are_not_quite_in_the_form_are_read(stdio, caplog):
    crude = {"command": [sys.executable, str(PROGRAM.with_name("crude_mcp.py"))]}
    assert [tool.name for tool in McpServer(crude, None)] == ["latin", "film", "bare"]
    assert "listed" in caplog.text and "'array'" in caplog.text
    assert answer(crude, "latin", timeout_s=20) == ("caf\ufffd", False)
    assert answer(crude, "film", k="v") == ("seen\n[video left out: video/mp4]", False)
    assert answer(crude, "bare") == ('{"result": []}', False)


def test_a_call_has_a_deadline_and_others_go_on(config):
    with pytest.raises(ToolFault, match=says("timeout_s", "slow")):
        answer(config, "slow", timeout_s=0.3)
    assert answer(config, "add", a=1, b=2) == ("3", False)


def test_a_program_has_its_variables_and_chosen_tools(stdio):
    assert answer(stdio, "variable", key="TOY") == ("red", False)
    assert [
        tool.schema["function"]["name"] for tool in McpServer(stdio | {"tools": ["end", "add"]}, None)
    ] == ["end", "add"]


def test_an_error_of_one_call_leaves_the_others_their_connection(config):
    server = McpServer(config, None)
    wait, refuse = (
        next(tool for tool in server if tool.schema["function"]["name"] == name)
        for name in ("wait", "refuse")
    )

    async def main():
        waiting = asyncio.create_task(wait.execute(None, {}))
        with pytest.raises(EnvironmentFault, match=says("refuse", "quota")):
            await refuse.execute(None, {})
        return await waiting

    assert asyncio.run(main()) == "waited"


def test_a_server_that_ended_fails_the_call_and_is_started_again(stdio):
    with pytest.raises(Exception, match=says("end", "Connection closed")):
        answer(stdio, "end")
    assert answer(stdio, "add", a=1, b=2) == ("3", False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"url": "http://127.0.0.1:1/mcp"}, says("http://127.0.0.1:1/mcp", "ConnectError")),
        ({"url": "localhost"}, "missing an 'http://'"),
        ({"command": ["/no/such/program"]}, says("/no/such/program", "FileNotFoundError")),
        ({"command": ["true"]}, says("MCP server true", "MCPError")),
    ],
)
def test_a_server_that_cannot_be_reached_is_refused(config, message):
    pytest.importorskip("mcp")
    with pytest.raises(NotAvailableError, match=message):
        McpServer(config, None)


def test_a_server_that_says_nothing_is_refused(monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(mcp_server, "CONNECT_S", 0.5)
    with pytest.raises(NotAvailableError, match=says("sleep 1000", "0.5 s")):
        McpServer({"command": ["sleep", "1000"]}, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, says("command", "url")),
        ({"command": ["a"], "url": "b"}, says("command", "url")),
        ({"command": "python a.py"}, says("config.command", "'python a.py'", "list")),
        ({"command": ["a", 1]}, says("config.command", "list")),
        ({"url": 5}, says("config.url", "5", "string")),
        ({"url": "a", "env": {"A": 1}}, says("config.env", "dict")),
        ({"uri": "a"}, says("'uri'", "'url'")),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        McpServer(config, None)


def test_a_tool_that_the_server_lacks_is_refused(stdio):
    with pytest.raises(ConfigError, match=says("'adds'", "'add'")):
        McpServer(stdio | {"tools": ["adds"]}, None)
    with pytest.raises(ConfigError, match="remove tool_schema"):
        McpServer(stdio, {"type": "function"})


def test_without_its_library_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(NotAvailableError, match=says("pip install -e '.[tools]'")):
        McpServer({"url": "http://127.0.0.1:2/mcp"}, None)
