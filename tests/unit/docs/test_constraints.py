"""The pins satisfy what pyproject asks for, extras included, and name no address."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_line_is_an_exact_pin():
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []


def test_every_requirement_is_pinned_within_its_range():
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
    asked = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    wrong = []
    for requirement in map(Requirement, asked):
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            wrong.append(f"{requirement} is pinned to {version}")
    assert wrong == []
