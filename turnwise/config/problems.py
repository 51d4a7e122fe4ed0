"""Problems of a config, and one error message for all of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turnwise.errors import ConfigError

Path = tuple[str | int, ...]
MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the key at `path`, in one sentence."""

    path: Path
    message: str

    @classmethod
    def at(cls, key: str, message: str) -> "Problem":
        """The problem with this message at a dotted key."""
        return cls(tuple(key.split(".")), message)

    @property
    def key(self) -> str:
        """The dotted key, with list indices in brackets.

        >>> Problem(("custom_envs", "Lake", "tools", 0), "").key
        'custom_envs.Lake.tools[0]'
        """
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text


def config_error(source: str, problems: Sequence[Problem], location: Callable[[Path], str]) -> ConfigError:
    """One error that lists the problems, each once, with the place that `location` gives for its path."""
    parts = ((location(problem.path), problem.key, problem.message) for problem in problems)
    lines = list(dict.fromkeys("  " + ": ".join(filter(None, of_problem)) for of_problem in parts))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    headline = f"{source} can't be used: {count}."
    shown = lines
    if len(lines) > MAX_SHOWN:
        shown = [
            *lines[:MAX_SHOWN],
            f"  … and {len(lines) - MAX_SHOWN} more; `turnwise config FILE --all` shows them",
        ]
    return ConfigError("\n".join([headline, *shown]), complete="\n".join([headline, *lines]))


def as_sentences(problems: Iterable[Problem]) -> list[str]:
    """`key: message` of each problem."""
    return [f"{problem.key}: {problem.message}" for problem in problems]
