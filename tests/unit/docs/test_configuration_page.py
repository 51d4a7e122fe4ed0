"""docs/configuration.md is what `make docs` writes now."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings.leaves import KINDS, leaves
from settings.page import page

DOC = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_fresh() -> None:
    assert DOC.read_text(encoding="utf-8") == page(), "docs/configuration.md is stale; run `make docs`"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_setting_says_what_it_does_and_stands_on_the_page(kind) -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    for leaf in leaves(kind):
        assert leaf.text, f"{leaf.owner.__name__} says nothing of {leaf.key}"
        keys = (leaf.key, leaf.key.partition(".")[2])
        assert any(
            line.startswith(f"| `{key}` |") and leaf.text.replace("|", "\\|") in line
            for line in lines
            for key in keys
        )
