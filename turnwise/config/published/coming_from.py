"""Keys of other systems (`published.yaml`): their counterparts here, and defaults that differ."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from turnwise.config.problems import Path as KeyPath
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.show.dump import leaves
from turnwise.spec.package_tables import read_table

AnswerKind = Literal["", "warn", "nothing to do", "refuse"]


@dataclass(frozen=True, slots=True)
class Retired:
    """Keys of ROLL that have no counterpart here, and the `reason`. `published.yaml` explains the other
    fields."""

    reason: str
    keys: Sequence[str]
    answer: Literal["warn", "nothing to do", "refuse", "refuse own classes"] = "warn"
    harmless: Sequence[Any] = ()
    idle: Sequence[str] = ()

    def answer_to(self, value: Any) -> AnswerKind:
        """How to answer one of these keys if it has this value; empty if no answer is needed."""
        if value is None or any(type(value) is type(known) and value == known for known in self.harmless):
            return ""
        if self.answer == "refuse own classes":
            return "nothing to do" if str(value).startswith("roll.") else "refuse"
        is_idle = (
            self.idle
            and isinstance(value, dict)
            and all(str(key).startswith(tuple(self.idle)) for key in value)
        )
        return "nothing to do" if is_idle else self.answer


@cache
def vocabulary() -> Mapping[str, Any]:
    """The top-level sections of `published.yaml` by name."""
    return read_table(__file__, "published.yaml")


@cache
def retired_keys() -> Mapping[str, Retired]:
    """The retired keys by dotted name, with `<role>`, `<manager>` and `<env>` for the sections that occur
    more than once."""
    return {
        key: entry
        for entry in (Retired(**retired) for retired in vocabulary()["retired"])
        for key in entry.keys
    }


PUBLISHED = "ROLL"
"""The system whose files are translated (`config.published`)."""
_SHORTEST = 6  # minimum characters of a top-level key that is compared with the ends of other systems' keys


def unknown_leaves(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """The keys to report for an unknown key: if it is a section of another system, each key in it; else the
    key itself."""
    start = ".".join(map(str, path)) + "."
    if isinstance(value, dict) and any(f".{start}" in f".{key}" for key in _keys()):
        for name, inner in value.items():
            yield from unknown_leaves((*path, name), inner)
    else:
        yield path


def counterpart(path: KeyPath, top_level: Collection[str] = ()) -> str:
    """A hint for a key of another system: our key, and how its value converts; empty if no known system has
    such a key. With the keys of a config's `top_level`, such as SFT's, which has no `actor_train` around its
    sections, our key is that config's.

    >>> counterpart(("num_generations",))
    " Did you mean 'train_env_manager.group_size'? (TRL and Hugging Face's num_generations: the same number)"
    """
    parts = [str(part) for part in path]
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    theirs = next((end for end in ends if end in _keys()), None)
    if theirs is None and (len(parts) > 1 or len(ends[0]) >= _SHORTEST):
        theirs = next((key for key in _keys() if key.endswith(f".{ends[0]}")), None)
    if theirs is None:
        sections = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        theirs = next((section for section in sections if section in _keys()), None)
    if theirs is None:
        return ""
    system, ours, how = _keys()[theirs]
    if ours and top_level and ours.partition(".")[0] not in top_level:
        here = ours.partition(".")[2]
        if here.partition(".")[0] not in top_level:
            return (
                f" {system}'s {theirs} is {ours} here, a key of `turnwise train` that this config "
                f"doesn't have."
            )
        ours = here
    return (
        f" Did you mean {ours!r}? ({system}'s {theirs}: {how})"
        if ours
        else f" It has no counterpart here: {how}."
    )


def differing_defaults(config: AgenticConfig) -> str:
    """A note on keys that the file leaves out and that have another default in ROLL; empty if there are
    none."""
    differing, values = [], dict(leaves(config.model_dump()))
    for theirs, value, ours, *_ in vocabulary()["systems"][PUBLISHED]["defaults"]:
        here = values.get(ours)
        is_given = config.is_set("pg_args" if ours.startswith("pg_args.") else ours)
        if not is_given and here is not None and here != value:
            differing.append(f"{theirs} ({_yaml(here)} here, {_yaml(value)} there)")
    return (
        f"what this file leaves out has other defaults in {PUBLISHED}: {', '.join(differing)}"
        if differing
        else ""
    )


@cache
def _keys() -> dict[str, tuple[str, str, str]]:
    """Key of another system → `(system, our key, how the value converts)`; without a counterpart `(system,
    "", the reason)`."""
    answers: dict[str, tuple[str, str, str]] = {}
    for name, system in vocabulary()["systems"].items():
        answers.update({key: (name, *entry) for key, entry in system["keys"].items()})
        for reason, keys in system.get("without", ()):
            answers.update(dict.fromkeys(keys, (name, "", reason)))
    return answers


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
