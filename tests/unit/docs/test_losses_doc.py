"""docs/losses.md has every loss with its parameters, defaults and paper, and every granularity and
aggregation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnwise.spec import LOSS_AGG_MODES, PG_VARIANTS

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")


def row_of(name: str) -> list[str]:
    """The cells of the first table row of a name."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


@pytest.mark.parametrize(("name", "spec"), PG_VARIANTS.items(), ids=PG_VARIANTS)
def test_the_table_has_the_parameters_with_their_defaults_and_the_paper(name, spec):
    _, _, parameters, source = row_of(name)
    assert {
        key: float(value) for key, value in re.findall(r"`(\w+)` ([\d.e-]+\d)", parameters)
    } == spec.parameters
    assert all(paper in source for paper in re.findall(r"arXiv:(\S+\d)", spec.paper)) or source == "the same"


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_every_aggregation_names_the_losses_that_have_it_by_default(mode):
    own = {name for name, spec in PG_VARIANTS.items() if spec.aggregation == mode}
    [name, *_] = row_of(mode)
    if mode == "token-mean":
        assert name.endswith("(default)") and len(own) > len(PG_VARIANTS) / 2
    else:
        assert set(re.findall(r"`(\w+)`", name.removeprefix(f"`{mode}`"))) == own
