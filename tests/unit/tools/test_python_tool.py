"""The tool `python`."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.errors import ConfigError
from turnwise.protocols import Tool
from turnwise.tools import jail
from turnwise.tools.python_tool import PythonTool

pytestmark = pytest.mark.skipif(jail.libc.syscall(444, None, 0, 1) < jail.MIN_LANDLOCK, reason="this kernel has no Landlock")


def answer(code: str, **config) -> str:
    tool = PythonTool(config, None)
    assert isinstance(tool, Tool)
    return asyncio.run(tool.execute(None, {"code": code}))


def test_the_model_reads_what_its_program_prints():
    assert answer("print(123 * 457)") == "56211\n"


def test_an_error_is_a_result():
    assert answer("print('a')\n{}['b']").endswith("KeyError: 'b'\n")


def test_silence_is_said():
    assert answer("x = 1") == "The program printed nothing."


def test_limits_are_config():
    assert answer("while True: pass", timeout_s=0.2).endswith("The code ran for longer than 0.2 s and was ended.")
    assert "bytes left out" in answer("print('x' * 500)", max_output=100)
    assert "MemoryError" in answer("bytearray(100 << 20)", memory_mb=64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeout": 3}, r"has no key 'timeout'; it has timeout_s, .*Did you mean 'timeout_s'"),
        ({"timeout_s": "3"}, "config.timeout_s is '3'; it must be a positive number"),
        ({"memory_mb": 0}, "config.memory_mb is 0"),
        ({"max_output": True}, "config.max_output is True"),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        PythonTool(config, None)
