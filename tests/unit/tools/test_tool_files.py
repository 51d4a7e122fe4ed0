"""Tools and agent loops that files name, and rows that fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from messages import says
from toy_rewards import TellsTools
from toy_tools import LACKS_SANDBOX, Notebook, called, schema

from turnwise.assemble.agents import build_row_agent
from turnwise.config import AgenticConfig, parse_config
from turnwise.errors import ConfigError, DataError, EnvironmentFault
from turnwise.examine.examined import examine
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.tools.gsm8k import Gsm8kTool

HALF = '''
import math

def half(x: float) -> float:
    """Halves a number.

    Args:
        x: The number.
    """
    return _halved(x)

def _halved(x):
    return x / 2
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(tools: Any = None, rows: list[dict[str, Any]] | None = None, **changes: Any) -> AgenticConfig:
    agent = {}
    if tools is not None:
        Path("tools.yaml").write_text(tools if isinstance(tools, str) else json.dumps(tools))
        agent["tool_config_path"] = "tools.yaml"
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [{"prompt": "1"}]))
    data = {"train_files": ["rows.jsonl"], "reward": ["toy_rewards:length"], **changes.pop("data", {})}
    values = {"pretrain": "model", "data": data, "agent": agent | changes.pop("agent", {}), "eval_steps": 0}
    return parse_config(values | changes, AgenticConfig)[0]


def test_a_tool_file_in_the_published_form(folder: Path) -> None:
    tools = [
        {
            "class_name": "toy_tools.Notebook",
            "config": {"reward": 2.0},
            "tool_schema": schema("pad"),
            "max_concurrency": 3,
        },
        {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}},
        {"class_name": "calculator", "timeout_s": 2.0},
        {"class_name": "toy_tools:divide"},
    ]
    box = examine(config_of({"tools": tools})).tools
    assert box.names == ["pad", "calc_gsm8k_reward", "calculator", "divide"]
    pad, gsm8k, calculator, _ = box.tools
    assert isinstance(pad.tool, Notebook) and (pad.tool.reward, pad.max_concurrency) == (2.0, 3)
    assert isinstance(gsm8k.tool, Gsm8kTool) and calculator.timeout_s == 2.0


def test_public_functions_of_a_file_are_tools(folder: Path) -> None:
    (folder / "own.py").write_text(HALF)
    box = examine(config_of(agent={"function_tool_path": "own.py"})).tools
    assert box.names == ["half"] and called(box, "half", x=3)[0].text == "1.5"


HELPERS = """
from contextlib import contextmanager
from textwrap import dedent

@contextmanager
def timeout(seconds: int):
    \'\'\'Ends what takes longer.\'\'\'
    yield

def clean(text):
    return text.strip()

"""


def test_helpers_in_a_file_of_functions_are_no_tools(folder: Path) -> None:
    (folder / "own.py").write_text(HELPERS + HALF)
    examined = examine(config_of(agent={"function_tool_path": "own.py"}))
    assert examined.tools.names == ["half"]
    notes = " ".join(examined.notes)
    assert "timeout" in notes and "clean" in notes and "dedent" not in notes
    (folder / "own.py").write_text(HALF + "\n__all__ = ['half']\ndef other(x):\n    'Not exported.'\n")
    assert examine(config_of(agent={"function_tool_path": "own.py"})).tools.names == ["half"]
    (folder / "own.py").write_text(HELPERS)
    with pytest.raises(ConfigError, match=says("agent.function_tool_path", "clean", "docstring")):
        _ = examine(config_of(agent={"function_tool_path": "own.py"})).tools


@pytest.mark.skipif(LACKS_SANDBOX, reason="this kernel has no Landlock")
def test_the_python_tool_by_its_name(folder: Path) -> None:
    box = examine(config_of({"tools": [{"class_name": "python", "config": {"timeout_s": 20}}]})).tools
    assert called(box, "python", code="print(2 ** 10)")[0].text == "1024\n"


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("[1, 2", "tools.yaml"),
        ("tools: 3", says("agent.tool_config_path", "tools", "list")),
        ({"tools": [{"config": {}}]}, says("tools[0].class_name", "required")),
        ({"tools": [{"class_name": "calculater"}]}, says("tools[0].class_name", "'calculator'")),
        ({"tools": [{"class_name": "no_such_module.Tool"}]}, "no module 'no_such_module'"),
        ({"tools": [{"class_name": "toy_tools.Nothing"}]}, says("toy_tools", "'Nothing'")),
        ({"tools": [{"class_name": "toy_tools.Any"}]}, "Any"),
        (
            {"tools": [{"class_name": "calculator", "config": {"a": 1}}]},
            says("function", "config"),
        ),
        (
            {"tools": [{"class_name": "calculator", "tool_schema": {"type": "function"}}]},
            says("function", "name"),
        ),
        (
            {"tools": [{"class_name": "toy_tools.Undated"}]},
            says("undated", "date"),
        ),
        (
            {"tools": [{"class_name": "calculator", "timeout": 1}]},
            says("tools[0].timeout", "'timeout_s'"),
        ),
        ({"mcp": {"command": ["a"]}}, "key mcp.*class_name: mcp"),
        ({"mcpServers": {"a": {"command": "b"}}}, "key mcpServers.*class_name: mcp"),
        (
            {"tools": [{"class_name": "own.Search", "mcp": {"mcp_servers_config_path": "a.json"}}]},
            "key mcp.*class_name: mcp",
        ),
        (
            {"tools": [{"class_name": "calculator"}, {"class_name": "calculator"}]},
            says("two tools", "calculator"),
        ),
    ],
)
def test_a_wrong_tool_file_is_refused(tools: Any, said: str, folder: Path) -> None:
    with pytest.raises((ConfigError, EnvironmentFault), match=said):
        _ = examine(config_of(tools)).tools


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, says("agent.function_tool_path", "Python file")),
        ("x = 1", "no public function"),
        ("1/0", "division"),
    ],
)
def test_a_wrong_file_of_functions_is_refused(text: str | None, said: str, folder: Path) -> None:
    if text is not None:
        (folder / "own.py").write_text(text)
    with pytest.raises((ConfigError, EnvironmentFault), match=said):
        _ = examine(config_of(agent={"function_tool_path": "own.py"})).tools


CALCULATOR = {"tools": [{"class_name": "calculator"}]}


@pytest.mark.parametrize(
    ("tools", "row", "said"),
    [
        (
            CALCULATOR,
            {},
            says("rows.jsonl", "calculator", "row"),
        ),
        (None, {"agent_name": "tool_agent"}, says("tool_agent", "tool_config_path")),
        (
            {"tools": []},
            {"agent_name": "tool_agent"},
            says("tool_agent", "tools.yaml", "agent.tool_config_path"),
        ),
        (
            CALCULATOR,
            {"agent_name": "tool_agnet"},
            says("'tool_agnet'", "'tool_agent'"),
        ),
        (
            CALCULATOR,
            {"agent_name": "tool_agent", "extra_info": {"tools_kwargs": {"python": {}, "calculator": None}}},
            says("extra_info", "'python'", "calculator"),
        ),
        (
            CALCULATOR,
            {"agent_name": "tool_agent_loop", "extra_info": {"tool_selection": ["search"]}},
            "the tool 'search'",
        ),
        *(
            (
                CALCULATOR,
                {"agent_name": "tool_agent", "extra_info": extra},
                says("extra_info", "tools_kwargs"),
            )
            for extra in (
                "a",
                ["a"],
                {"tools_kwargs": [1]},
                {"tools_kwargs": {"calculator": 1}},
                {"tool_selection": "python"},
            )
        ),
    ],
)
def test_a_row_that_does_not_fit_the_tools_is_refused(
    tools: Any, row: dict[str, Any], said: str, folder: Path
) -> None:
    with pytest.raises(DataError, match=said):
        _ = examine(config_of(tools, [{"prompt": "1", **row}])).rows("train").rows


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"agent_name": "tool_agent_loop"}, {}),
        ({"agent_name": "single_turn_agent", "extra_info": "any text"}, {}),
        ({}, {"default_agent": "single_turn_agent"}),
        ({}, {"default_agent": "tool_agent_loop"}),
    ],
)
def test_a_row_that_says_how_it_is_played_is_taken(
    row: dict[str, Any], data: dict[str, Any], folder: Path
) -> None:
    assert examine(config_of(CALCULATOR, [{"prompt": "1", **row}], data=data)).rows("train").rows


def test_a_loop_of_a_user_by_its_name(folder: Path) -> None:
    loops = [{"name": "teller", "_target_": "toy_rewards.TellsTools", "extra": "a"}]
    (folder / "loops.yaml").write_text(json.dumps(loops))
    config = config_of(
        CALCULATOR, [{"prompt": "1", "agent_name": "teller"}], agent={"agent_config_path": "loops.yaml"}
    )
    assert examine(config).rows("train").rows
    agent = build_row_agent(examine(config), "train", "teller", WatchedRunner())
    assert isinstance(agent, TellsTools)
    (folder / "loops.yaml").write_text(json.dumps([loops[0] | {"extras": "a"}]))
    with pytest.raises(ConfigError, match=says("loops.yaml", "extras", "teller")):
        build_row_agent(examine(config), "train", "teller", WatchedRunner())
