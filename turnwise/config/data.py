"""Tasks from data sets, and agents with tools."""

from __future__ import annotations

from typing import Literal

from turnwise.config.environments import AgentName
from turnwise.config.section import Names, PositiveCount, Seconds, Section


class Data(Section):
    """Rows of JSONL or Parquet files as tasks."""

    train_files: Names | None = None
    """Files of training rows."""
    val_files: Names | None = None
    """Files of validation rows."""
    prompt_key: str = "prompt"
    """Column of the first messages."""
    agent_name_key: str = "agent_name"
    """Column that names the agent of a row."""
    default_agent: AgentName = "single_turn_agent"
    """The agent of rows that name none."""
    reward: dict[str, float] | str | None = None
    """Registered reward functions with their weights, or one as `module:function`."""
    max_prompt_length: PositiveCount | None = None
    """Rows with a longer prompt are left out, and counted."""
    shuffle: bool = True
    """A new order each epoch."""


class Agent(Section):
    """What tool agents may do."""

    tool_config_path: str | None = None
    """File that describes tools."""
    function_tool_path: str | None = None
    """Python file whose functions are tools."""
    interaction_config_path: str | None = None
    """File that describes simulated users."""
    agent_config_path: str | None = None
    """File that registers your own agent loops."""
    tool_parser: str = "hermes"
    """Form of the tool calls in the model's text."""
    max_assistant_turns: PositiveCount | None = None
    """Responses of an episode at most."""
    max_user_turns: PositiveCount | None = None
    """Messages of a simulated user at most."""
    max_parallel_calls: PositiveCount = 1
    """Calls of one turn that are executed."""
    max_tool_response_length: PositiveCount = 1024
    """Characters of a tool's result that are shown."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """The part of a longer result that is removed."""
    tool_timeout_s: Seconds | None = None
    """Time of one call."""
