"""The function that makes graphs, as the config names it."""

from collections.abc import Callable
from typing import Any

from turnwise.config import AgenticConfig
from turnwise.errors import ConfigError
from turnwise.runtime.entry_points import load_function


def load_graph(config: AgenticConfig) -> Callable[..., Any] | None:
    """The function that `agent.graph` names; None if it is unset. Raises ConfigError if there is no such
    function."""
    if config.agent.graph is None:
        return None
    return load_function(config.agent.graph, "agent.graph", ConfigError, ["model", "tools"])
