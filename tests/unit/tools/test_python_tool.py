"""The tool `python`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from messages import mentions, says
from toy_tools import LACKS_SANDBOX

from turnwise.errors import ConfigError, NotAvailableError
from turnwise.protocols import Tool
from turnwise.tools.python_tool import PythonTool

pytestmark = pytest.mark.skipif(LACKS_SANDBOX, reason="this kernel has no Landlock")


def answer(code: str, **config) -> str:
    tool = PythonTool(config, None)
    assert isinstance(tool, Tool)
    return asyncio.run(tool.execute(None, {"code": code}))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(123 * 457)", r"56211\n"),
        ("print('a')\n{}['b']", r"a\n.*KeyError: 'b'\n"),
        ("x = 1", r"The program printed nothing\."),
    ],
)
def test_the_model_reads_what_its_program_prints(code, said):
    assert re.fullmatch(said, answer(code), re.DOTALL)


def test_limits_are_config():
    assert answer("while True: pass", timeout_s=0.2).endswith(
        "The code ran for longer than 0.2 s and was ended."
    )
    assert "bytes left out" in answer("print('x' * 500)", max_output=100)
    assert "MemoryError" in answer("bytearray(100 << 20)", memory_mb=64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeout": 3}, says("'timeout'", "'timeout_s'")),
        ({"timeout_s": "3"}, says("python", "config.timeout_s", "'3'", "above 0")),
        ({"memory_mb": 0}, "config.memory_mb is 0"),
        ({"max_output": 2.5}, says("config.max_output", "2.5", "whole")),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        PythonTool(config, None)


def test_the_log_says_what_isolates(caplog):
    caplog.set_level("INFO")
    PythonTool({}, None)
    assert mentions(caplog.text, "Landlock", "seccomp")


def test_a_system_that_offers_nothing_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "jail.py").write_text("print('refused: no means')")
    monkeypatch.setattr("turnwise.tools.sandbox.JAIL", tmp_path / "jail.py")
    with pytest.raises(NotAvailableError, match=says("isolate", "no means")):
        PythonTool({}, None)


def test_the_documented_reward_runs_programs():
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "run_python" in block
    ]
    names: dict = {}
    exec(example, names)
    completions = ["def twice(x):\n    return 2 * x", "def twice(x):\n    return x * x", "twice = "]
    assert asyncio.run(names["passes"](completions, ["assert twice(3) == 6"] * 3)) == [1.0, 0.0, 0.0]
