"""A config of another system while its keys are translated."""

from dataclasses import dataclass, field
from typing import Any

from turnwise.config.problems import Problem


@dataclass
class Translation:
    """A config in our vocabulary, with notes on its translation."""

    raw: dict[str, Any]
    """The config, as yet unvalidated. The translation changes it in place."""
    notes: list[str] = field(default_factory=list)
    """Notes on translated keys."""
    ineffective: list[Problem] = field(default_factory=list)
    """A problem for each known key that has no effect here; a warning, or an error under `--strict`."""
    problems: list[Problem] = field(default_factory=list)
    is_published: bool = False
    """Whether a key occurs that only published files have."""
    unplayed: frozenset[str] = frozenset()
    """Tags of environments that neither manager plays."""

    def refusing(self, problems: list[Problem]) -> list[Problem]:
        """The problems for which the config is refused. A faulty environment that is never played is removed,
        with a note."""
        refusing = []
        for problem in problems:
            tag = str(problem.path[1]) if len(problem.path) > 1 else ""
            if problem.path[:1] == ("custom_envs",) and tag in self.unplayed:
                self.notes.append(
                    f"{problem.key}: {problem.message} It is left out, since no manager's tags name it."
                )
                self.section("custom_envs").pop(tag, None)
            else:
                refusing.append(problem)
        return refusing

    def section(self, *path: str) -> dict[str, Any]:
        """The mapping at a path; if there is none, a new empty one that isn't part of the config."""
        value = self.raw
        for part in path:
            inner = value.get(part)
            if not isinstance(inner, dict):
                return {}
            value = inner
        return value

    def move(self, source: tuple[str, ...], target: tuple[str, ...], value: Any = None) -> None:
        """Moves the source key's value, or `value`, to the target key. Adds a problem if the target has
        another value. The value is lost if a section of the target isn't a mapping, which validation
        refuses."""
        *sections, key = source
        theirs = self.section(*sections).pop(key)
        if value is None:
            value = theirs
        place = self.raw
        for part in target[:-1]:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                return
        ours = ".".join(target)
        current = place.get(target[-1], value)
        if current != value:
            message = f"says {value!r} and {ours} says {current!r}; keep one of them"
            self.problems.append(Problem(source, message))
        else:
            place[target[-1]] = value
            self.notes.append(f"{'.'.join(source)} is read as {ours}: {value!r}")
