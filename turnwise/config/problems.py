"""Problems of a config, and one error message for all of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turnwise.errors import ConfigError, counted

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
            if isinstance(part, int):
                text += f"[{part}]"
            elif text:
                text += f".{part}"
            else:
                text = part
        return text


def config_error(source: str, problems: Sequence[Problem], location: Callable[[Path], str]) -> ConfigError:
    """One error that lists the problems, each once, with the place that `location` gives for its path."""
    lines: dict[str, None] = {}
    for problem in problems:
        parts = (location(problem.path), problem.key, problem.message)
        text = ": ".join(filter(None, parts))
        lines[f"  {text}"] = None
    headline = f"{source} can't be used: {counted(len(lines), 'problem')}."
    complete = [headline, *lines]
    shown = complete[: 1 + MAX_SHOWN]
    if len(lines) > MAX_SHOWN:
        num_left = len(lines) - MAX_SHOWN
        shown.append(f"  … and {num_left} more; `turnwise config FILE --all` shows them")
    return ConfigError("\n".join(shown), complete="\n".join(complete))


def as_sentences(problems: Iterable[Problem]) -> list[str]:
    """`key: message` of each problem."""
    return [f"{problem.key}: {problem.message}" for problem in problems]
