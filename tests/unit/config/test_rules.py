"""Rules between settings name settings that exist."""

from __future__ import annotations

import pytest
from settings.leaves import Kind, leaves

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.checks.contradictions import AGENTIC_RULES
from turnwise.config.checks.rules.algorithm import SIBLING_RULES
from turnwise.config.checks.rules.sft import SFT_RULES
from turnwise.config.checks.without_effect import REQUIREMENTS, ROLE_REQUIREMENTS, SFT_REQUIREMENTS

REFUSED = {
    AgenticConfig: [rule.key for rule in (*AGENTIC_RULES, *SIBLING_RULES)],
    SFTConfig: [rule.key for rule in SFT_RULES],
}
OF_ROLES = [
    f"{role}.{key}"
    for role, rows in ROLE_REQUIREMENTS.items()
    for requirement in rows
    for key in requirement.keys
]
IDLE = {
    AgenticConfig: [*OF_ROLES, *(key for requirement in REQUIREMENTS for key in requirement.keys)],
    SFTConfig: [key for requirement in SFT_REQUIREMENTS for key in requirement.keys],
}


def keys_of(kind: Kind) -> set[str]:
    """Every dotted key of a kind of config, sections included."""
    paths = [tuple(map(str, leaf.path)) for leaf in leaves(kind)]
    return {".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)}


@pytest.mark.parametrize("kind", [AgenticConfig, SFTConfig])
@pytest.mark.parametrize("table", [REFUSED, IDLE], ids=["refused", "without effect"])
def test_every_key_of_a_rule_is_a_key_of_its_config(table: dict[Kind, list[str]], kind: Kind) -> None:
    # `custom_envs.data` is the section of one tag.
    missing = set(table[kind]) - keys_of(kind) - {"custom_envs.data"}
    assert table[kind] and not missing
