"""A word of YAML means the same in every file that is read, and on the command line of the tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from messages import says

from turnwise.cli.env_target import parse_arguments
from turnwise.cli.tool_command import _parameters
from turnwise.config.read.agent_files import read_interaction_file, read_loop_file, read_tool_file
from turnwise.config.read.compose import compose
from turnwise.config.read.yaml_text import load_yaml
from turnwise.config.show.dump import _Dumper
from turnwise.errors import ConfigError

WORDS: dict[str, Any] = {
    "1e-3": 0.001,
    "1e6": 1e6,
    "1E5": 1e5,
    "-2e-4": -0.0002,
    "+3e2": 300.0,
    "1.5e-3": 0.0015,
    "1.5e3": 1500.0,
    "1.0e+3": 1000.0,
    "1_0e2": 1000.0,
    ".5": 0.5,
    ".5e-1": 0.05,
    "5.": 5.0,
    "1.": 1.0,
    "-.5": "-.5",
    "12": 12,
    "+7": 7,
    "1_000": 1000,
    "1_000.5": 1000.5,
    "010": 8,
    "08": "08",
    "0x1F": 31,
    "0b101": 5,
    "0o17": "0o17",
    "1:30": 90,
    "1:30.5": 90.5,
    "190:20:30": 685230,
    "on": True,
    "Off": False,
    "yes": True,
    "NO": False,
    "y": "y",
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "2024-01-31": "2024-01-31",
    "2024-13-31": "2024-13-31",
    "2024-01-31 10:20:30": "2024-01-31 10:20:30",
    ".inf": float("inf"),
    "-.Inf": float("-inf"),
    "inf": "inf",
    "1e": "1e",
    "e5": "e5",
    "1e5x": "1e5x",
    "1.2.3": "1.2.3",
    "'1e-3'": "1e-3",
    "text": "text",
}


def test_every_reader_takes_a_word_for_the_same_value(tmp_path: Path) -> None:
    lines = "".join(f"w{number}: {word}\n" for number, word in enumerate(WORDS))
    entry = "\n".join(f"      {line}" for line in lines.splitlines())
    files = {
        "config.yaml": lines,
        "tools.yaml": f"tools:\n  - class_name: own.Tool\n    config:\n{entry}\n",
        "users.yaml": f"interaction:\n  - name: ann\n    class_name: own.User\n    config:\n{entry}\n",
        "loops.yaml": f"- name: loop\n  _target_: own.Loop\n  words:\n{entry}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    [tool], [user] = (
        read_tool_file(str(tmp_path / "tools.yaml")),
        read_interaction_file(str(tmp_path / "users.yaml")),
    )
    read = {
        "config": compose(tmp_path / "config.yaml").values,
        "tools": tool.config,
        "users": user.config,
        "loops": read_loop_file(str(tmp_path / "loops.yaml"))["loop"].model_extra["words"],
        "plain": load_yaml(lines, "plain"),
        "words of the tool": _parameters([f"--w{number}={word}" for number, word in enumerate(WORDS)]),
        "arguments of check-env": parse_arguments([f"w{number}={word}" for number, word in enumerate(WORDS)]),
        "written and read": load_yaml(yaml.dump(load_yaml(lines, "plain"), Dumper=_Dumper), "written"),
    }
    for number, (word, value) in enumerate(WORDS.items()):
        for reader, values in read.items():
            got = values[f"w{number}"]
            assert (type(got), got) == (type(value), value), f"{reader} reads {word} as {got!r}"


def test_a_text_that_looks_like_a_number_is_written_so_that_a_config_reads_a_text(tmp_path: Path) -> None:
    values = {"a": "1e-3", "b": "1e6", "c": "010", "d": "yes", "e": "2024-01-31", "f": "1:30", "g": 1e-3}
    (tmp_path / "config.yaml").write_text(yaml.dump(values, Dumper=_Dumper), encoding="utf-8")
    assert compose(tmp_path / "config.yaml").values == values


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("own.yaml", "key a", "twice")):
        load_yaml("a: 1\na: 2", "own.yaml")
    assert load_yaml("x: &x {a: 1}\ny: {<<: *x, a: 2}", "own.yaml")["y"] == {"a": 2}
