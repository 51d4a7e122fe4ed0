"""Which of the objects that a run offers the constructor of a user's class asks for."""

import inspect
from collections.abc import Callable, Collection, Iterable

from turnwise.errors import ConfigError


def named_parameters(called: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of `called` that can be passed by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(called).parameters.values()
    return [parameter for parameter in parameters if parameter.kind in by_name]


def required_names(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The names of the parameters without a default."""
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def require_offered(
    parameters: Collection[inspect.Parameter], offered: Collection[str], agent: str, hint: str
) -> list[str]:
    """The names in `offered` that `parameters` have. Raises ConfigError if a parameter without a default
    isn't offered."""
    missing = [name for name in required_names(parameters) if name not in offered]
    if missing:
        raise ConfigError(
            f"{agent}: its constructor needs {', '.join(missing)}, but is offered {', '.join(offered)}; "
            f"{hint}"
        )
    return [parameter.name for parameter in parameters if parameter.name in offered]
