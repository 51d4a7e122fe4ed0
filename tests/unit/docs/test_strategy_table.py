"""docs/ranks.md says of each strategy what it does as `strategy_table` does; each cell names tests that there
are, and `turnwise config` accepts what works and refuses the rest.

`PYTHONPATH=.:tests/support python tests/unit/docs/test_strategy_table.py` writes the table anew."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from messages import mentions
from small_configs import config_of
from strategy_table import ENGINES, FEATURES, Feature, Refused, Works, table

from turnwise.config import describe
from turnwise.config.place import place, smallest_machine
from turnwise.errors import ConfigError
from turnwise.spec import STRATEGIES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "ranks.md"
MARKED = re.compile(r"(<!-- table of strategies -->\n).*?(<!-- end -->)", re.DOTALL)
CELLS = [
    pytest.param(feature, engine, id=f"{feature.title}-{engine}")
    for feature in FEATURES
    for engine in ENGINES
]


def rewritten(page: str) -> str:
    lines = "\n".join(["", *table(), ""])
    return MARKED.sub(lambda match: match[1] + lines + match[2], page)


def keys_of(feature: Feature, engine: str) -> Mapping[str, Any]:
    """A config of four devices in which a strategy of the engine is asked for the feature."""
    asked = {
        key: value.format(engine=engine) if isinstance(value, str) else value
        for key, value in feature.asks.items()
    }
    base = {
        "rollout_batch_size": 16,
        "num_gpus_per_node": 4,
        "actor_train.device_mapping": [0, 1],
        "actor_train.strategy_args.strategy_name": f"{engine}_train",
    }
    return {**base, **feature.others, **asked}


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert MARKED.search(page)
    assert rewritten(page) == page, "write it anew: python tests/unit/docs/test_strategy_table.py"


@pytest.mark.parametrize(("feature", "engine"), CELLS)
def test_config_accepts_what_works_and_refuses_the_rest(feature: Feature, engine: str) -> None:
    cell = feature.cells[engine]
    keys = keys_of(feature, engine)
    if isinstance(cell, Refused) and not cell.is_missing:
        with pytest.raises(ConfigError) as raised:
            config_of(**keys)
        assert mentions(str(raised.value), cell.key, f"{engine}_train", cell.instead)
        return
    config = config_of(**keys)
    placement = place(config, smallest_machine(config))
    missing = describe(config, placement).missing
    if isinstance(cell, Refused):
        assert mentions(missing, cell.key, cell.instead)
    else:
        assert not mentions(missing, "supported yet")


@pytest.mark.parametrize(("feature", "engine"), CELLS)
def test_what_works_names_tests_that_there_are(feature: Feature, engine: str) -> None:
    cell = feature.cells[engine]
    if not isinstance(cell, Works):
        return
    assert cell.tests
    for test in cell.tests:
        name, _, function = test.partition("::")
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, test


def test_every_engine_that_trains_has_a_column() -> None:
    names = {name.partition("_")[0] for name, spec in STRATEGIES.items() if spec.kind == "train"}
    assert names == set(ENGINES)
    for feature in FEATURES:
        assert feature.cells.keys() == set(ENGINES), feature.title


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
