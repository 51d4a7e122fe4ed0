"""What a rule about settings is, and the problems that tables of rules find in a config."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from turnwise.config.problems import Problem
from turnwise.config.schema.section import Section

C = TypeVar("C", bound=BaseModel, contravariant=True)
S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Rule(Generic[C]):
    """A refusal: if `when` is true of a config, the dotted `key` has the problem that it `says`."""

    key: str
    when: Callable[[C], object]
    says: Callable[[C], str]


@dataclass(frozen=True, slots=True)
class Requirement(Generic[C]):
    """Dotted keys of a section that have no effect, for the `reason` given, unless what they need is true of
    the section."""

    keys: tuple[str, ...]
    needs: Callable[[C], object]
    reason: str


def refused(rules: Iterable[Rule[S]], config: S) -> Iterator[Problem]:
    """A problem for each rule whose `when` is true of the config."""
    for rule in rules:
        if rule.when(config):
            yield Problem.at(rule.key, rule.says(config))


def without_effect(requirements: Iterable[Requirement[S]], section: S, *prefix: str) -> Iterator[Problem]:
    """A problem for each key of a section whose value isn't the default and has no effect. `prefix` is the
    section's path."""
    for requirement in requirements:
        if requirement.needs(section):
            continue
        for key in filter(section.departs, requirement.keys):
            path = (*prefix, *key.split("."))
            yield Problem(path, f"has no effect: {requirement.reason}.")
