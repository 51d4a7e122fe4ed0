"""Evaluates conditions of `rules.yaml` (refused settings, keys without effect) and `phrases.yaml` (texts of a run's table)."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from turnwise.config.place import follows
from turnwise.config.problems import Problem
from turnwise.config.section import Section
from turnwise.spec import MAX_KEPT
from turnwise.spec.package_tables import read_table

RULES: dict[str, list[dict[str, Any]]] = read_table(__file__, "rules.yaml")
PHRASES: dict[str, list[dict[str, Any]]] = read_table(__file__, "phrases.yaml")
_CUT = (
    "with top_k {c.train_sampling.top_k} and repetition_penalty {c.train_sampling.repetition_penalty:g} the sampler hides "
    f"which tokens were left to draw from, so exp(old − sampled) isn't an importance ratio. Take top_k 1 to {MAX_KEPT} beside "
    "top_p and min_p, or top_p 1, top_k 0, min_p 0; repetition_penalty must be 1"
)


class Requirement(NamedTuple):
    """Keys of a section that have no effect, for the `reason` given, unless at least one condition in `needs` holds."""

    keys: tuple[str, ...]
    needs: tuple[str, ...]
    reason: str


def requirements(*tables: str) -> tuple[Requirement, ...]:
    """The rows of these tables of `rules.yaml`, which say what keys need in order to have an effect."""
    found = []
    for row in (row for name in tables for row in RULES[name]):
        section, _, names = row["keys"].rpartition(":")
        keys = tuple(f"{section}.{name}" if section else name for name in names.split())
        found.append(Requirement(keys, tuple(row["needs"]), row["says"]))
    return tuple(found)


def impossible(table: str, config: Section) -> Iterator[Problem]:
    """A problem for each row of the `table` in `rules.yaml` whose `when` conditions all hold for the config."""
    for row in RULES[table]:
        if all(holds(condition, config) for condition in row["when"]):
            yield Problem.at(row["key"], row["says"].replace("{cut}", _CUT).format(c=config))


def phrases(row: str, config: Section) -> list[str]:
    """The phrases of `phrases.yaml` whose conditions hold, for one row of the table at a run's start."""
    parts = [part for part in PHRASES[row] if all(holds(condition, config) for condition in part.get("when", ()))]
    return [part["says"].format(c=config) for part in parts]


def without_effect(rows: Iterable[Requirement], section: Section, *prefix: str) -> Iterator[Problem]:
    """A problem for each key of a section whose value isn't the default and has no effect. `prefix` is the section's path."""
    for row in rows:
        if not any(holds(condition, section) for condition in row.needs):
            for key in filter(section.departs, row.keys):
                yield Problem((*prefix, *key.split(".")), f"has no effect: {row.reason}.")


def holds(condition: str, section: Any) -> bool:
    """Whether a condition is true of the section. The head of `rules.yaml` explains conditions."""
    word, _, rest = condition.partition(" ")
    if word == "not":
        return not holds(rest, section)
    if word == "given":
        return section.departs(rest)
    if word == "several":
        return len(_value(rest, section) or ()) > 1
    if word == "placed":
        return follows(section, rest.removeprefix("by "))
    path, is_compared, expected = condition.partition(" is ")
    if is_compared:
        return str(_value(path, section)) == expected
    name, is_inside, path = condition.rpartition(" in ")
    value = _value(path, section)
    return name in value if is_inside else bool(value)


def _value(path: str, section: Any) -> Any:
    """The value at a dotted path; None if a section on the way is unset."""
    for name in path.split("."):
        section = None if section is None else getattr(section, name)
    return section
