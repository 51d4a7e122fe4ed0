"""Finds values that are allowed but far outside the range in which training works."""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from turnwise.config.problems import Path, Problem
from turnwise.config.section import Section
from turnwise.spec.package_tables import read_table


class Usual(NamedTuple):
    """A row of `unusual.yaml`: the usual range of some keys (a text), bounds far outside it, and what happens beyond these."""

    keys: str
    usual: str
    low: float = 0
    high: float = math.inf
    below: str = ""
    above: str = ""


_USUAL = [Usual(**row) for row in read_table(__file__, "unusual.yaml")]
_OF_KEY = {key: row for row in _USUAL for key in row.keys.split()}


def unusual(section: Section, idle: Collection[Path], path: Path = ()) -> Iterator[Problem]:
    """A problem for each setting that the user set outside its usual bounds, in a section at `path` and the sections in it.
    Settings in `idle`, which have no effect, and values of 0 (off) are never reported."""
    for key in type(section).model_fields:
        value, here = section.__dict__[key], (*path, key)
        if here in idle or key not in section.model_fields_set:
            continue
        if isinstance(value, Section):
            yield from unusual(value, idle, here)
        elif (row := _OF_KEY.get(key)) and value and not row.low <= abs(value) <= row.high:
            happens = row.below if abs(value) < row.low else row.above
            yield Problem(here, f"{value:g} is far from the usual {row.usual}: {happens}.")
