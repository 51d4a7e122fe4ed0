"""Which of the objects that a run offers the constructor of a user's class asks for."""

import inspect
from collections.abc import Callable, Collection

from turnwise.errors import ConfigError


def named_parameters(called: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of `called` that can be passed by name."""
    parameters = inspect.signature(called).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def require_offered(
    parameters: Collection[inspect.Parameter], offered: Collection[str], agent: str, hint: str
) -> list[str]:
    """The names in `offered` that `parameters` have. Raises ConfigError if a parameter without a default
    isn't offered."""
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in offered]
    if missing:
        raise ConfigError(
            f"{agent}: its constructor needs {', '.join(missing)}, but is offered {', '.join(offered)}; "
            f"{hint}"
        )
    return [p.name for p in parameters if p.name in offered]
