"""What the classes of agents are made from: each is given what its constructor asks for by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from turnwise.agents.tool_agent import ToolAgentLimits
from turnwise.build.tools import build_interactions, build_tools
from turnwise.config import AgenticConfig
from turnwise.errors import ConfigError
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Split


def offered_parts(config: AgenticConfig, split: Split, watchdog: Watchdog, stopwatch: Stopwatch) -> dict[str, Any]:
    """What agents of rows and of environments may ask for alike."""
    agent = config.agent
    limits = agent.max_parallel_calls, agent.max_tool_response_length, agent.tool_response_truncate_side
    return {
        "split": split,
        "seed": config.seed,
        "tools": build_tools(config, watchdog, stopwatch),
        "limits": ToolAgentLimits(*limits),
        "interactions": build_interactions(config, watchdog, stopwatch),
    }


def named_parameters(found: type) -> list[inspect.Parameter]:
    parameters = inspect.signature(found).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def asked_parts(parameters: Collection[inspect.Parameter], offered: Mapping[str, Any], agent: str, hint: str) -> dict[str, Any]:
    """The offered parts that a constructor has parameters for.

    Raises:
        ConfigError: it asks for something else.
    """
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in offered]:
        raise ConfigError(
            f"{agent}: its constructor asks for {', '.join(missing)}, and is offered {', '.join(offered)}; {hint}"
        )
    return {p.name: offered[p.name] for p in parameters if p.name in offered}
