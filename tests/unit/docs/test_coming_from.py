"""docs/coming_from.md is made from the table that answers unknown keys, and from the schema's own defaults.

`python tests/unit/docs/test_coming_from.py` writes its tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_configs import config_of

from turnwise.config import AgenticConfig
from turnwise.config.published.coming_from import vocabulary
from turnwise.config.read.load import _sections
from turnwise.config.schema.keys import DEFAULT_MAX_NEW_TOKENS
from turnwise.config.show.dump import leaves
from turnwise.spec import PG_VARIANTS

SYSTEMS = vocabulary()["systems"]
FILE = Path(__file__).parents[3] / "docs" / "coming_from.md"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def tables(name: str) -> Iterator[str]:
    system, ours = SYSTEMS[name], dict(leaves(config_of().model_dump()))
    yield f"| {name} | here | how the value converts |"
    yield "|---|---|---|"
    for theirs, (key, how) in system["keys"].items():
        yield f"| `{theirs}` | {f'`{key}`' if key else 'nothing'} | {how} |"
    for reason, keys in system.get("without", ()):
        yield f"| {', '.join(f'`{theirs}`' for theirs in keys)} | nothing | {reason} |"
    yield ""
    yield f"| default of {name} | there | key here | default here |"
    yield "|---|---|---|---|"
    for theirs, value, key, *effective in system["defaults"]:
        # A fourth value says what an unset key comes to, or what a number means.
        yield f"| `{theirs}` | {shown(value)} | `{key}` | {shown(effective[0] if effective else ours[key])} |"


def rewritten(text: str) -> str:
    """The page with every marked block replaced."""

    def block(match: re.Match[str]) -> str:
        return "\n".join([match[1], "", *tables(match[2]), "", "<!-- end -->"])

    return re.sub(r"(<!-- table of (.+?) -->).*?<!-- end -->", block, text, flags=re.DOTALL)


def test_no_row_differs_from_what_the_program_knows() -> None:
    page = FILE.read_text(encoding="utf-8")
    assert re.findall("<!-- table of (.+?) -->", page) == list(SYSTEMS)
    assert rewritten(page) == page, "write it anew: python tests/unit/docs/test_coming_from.py"


def test_the_effective_defaults_are_those_of_the_program() -> None:
    config = config_of()
    training = config.actor_train.training_args
    rows = {theirs: effective for theirs, *_, effective in SYSTEMS["TRL and Hugging Face"]["defaults"]}
    assert rows["max_completion_length"] == DEFAULT_MAX_NEW_TOKENS
    per_update = training.per_device_train_batch_size * training.gradient_accumulation_steps
    batch = AgenticConfig.model_fields["rollout_batch_size"].default
    said = re.findall(r"\d+", rows["steps_per_generation"])
    assert list(map(int, said)) == [
        training.gradient_accumulation_steps,
        batch // per_update,
        per_update,
        batch,
    ]


SECTIONS = dict(_sections(AgenticConfig))


def has_key(path: str) -> bool:
    section, _, key = path.rpartition(".")
    if section == "pg_args":
        return any(key in spec.parameters for spec in PG_VARIANTS.values())
    return section in SECTIONS and key in SECTIONS[section].model_fields


ENTRIES = [
    (theirs, ours, how) for system in SYSTEMS.values() for theirs, (ours, how) in system["keys"].items()
]


@pytest.mark.parametrize(("theirs", "ours", "how"), ENTRIES, ids=lambda value: None)
def test_every_entry_names_a_key_that_there_is(theirs: str, ours: str, how: str) -> None:
    assert not ours or has_key(ours), f"{theirs}: {ours}"
    assert how


if __name__ == "__main__":
    FILE.write_text(rewritten(FILE.read_text(encoding="utf-8")), encoding="utf-8")
