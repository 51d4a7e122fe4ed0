"""The keys of other systems, as `published.yaml` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from turnwise.package_tables import read_table

Answer = Literal["", "warn", "nothing to do", "refuse"]


@dataclass(frozen=True, slots=True)
class Retired:
    """Keys that aren't needed here, and why. `published.yaml` says what the other fields mean."""

    reason: str
    keys: Sequence[str]
    answer: Literal["warn", "nothing to do", "refuse", "refuse own classes"] = "warn"
    harmless: Sequence[Any] = ()
    idle: Sequence[str] = ()

    def answer_to(self, value: Any) -> Answer:
        """The effect of such a key with this value, in words; empty if it needs none."""
        if value is None or any(type(value) is type(known) and value == known for known in self.harmless):
            return ""
        if self.answer == "refuse own classes":
            return "nothing to do" if str(value).startswith("roll.") else "refuse"
        is_idle = self.idle and isinstance(value, dict) and all(str(key).startswith(tuple(self.idle)) for key in value)
        return "nothing to do" if is_idle else self.answer


@cache
def vocabulary() -> Mapping[str, Any]:
    """The parts of `published.yaml` by name."""
    content: dict[str, Any] = read_table(__file__, "published.yaml")
    return content


@cache
def retired_keys() -> Mapping[str, Retired]:
    """The retired keys by dotted name, with `<role>`, `<manager>` and `<env>` for the sections that occur more than once."""
    entries = [Retired(**entry) for entry in vocabulary()["retired"]]
    return {key: entry for entry in entries for key in entry.keys}
