"""docs/prompts.md names every placeholder, and its config is one."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from turnwise.config import ineffective, parse_config
from turnwise.spec import STEP_PLACEHOLDERS, TURN_PLACEHOLDERS

PAGE = (Path(__file__).parents[3] / "docs" / "prompts.md").read_text(encoding="utf-8")


def test_every_placeholder_has_a_row_with_its_mode() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `{")]
    shown = {
        name: row.split("|")[2].strip()
        for row in rows
        for name in re.findall(r"\{(\w+)\}", row.split("|")[1])
    }
    assert shown == dict.fromkeys(TURN_PLACEHOLDERS, "both") | dict.fromkeys(STEP_PLACEHOLDERS, "step")


def test_the_example_is_a_config_without_idle_keys() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config, notes = parse_config({"pretrain": "models/none", **yaml.safe_load(text)})
    assert ineffective(config) == notes == []
