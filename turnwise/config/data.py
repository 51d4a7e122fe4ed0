"""Tasks from data sets, and agents with tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from turnwise.config.environments import AgentName
from turnwise.config.section import Names, OneOf, PositiveCount, Seconds, Section
from turnwise.spec import REWARDS, TOOL_PARSERS


class RewardFunction(Section):
    """One reward and its weight."""

    name: Annotated[str, AfterValidator(OneOf(REWARDS, own="module:function"))]
    """A registered name, or `module:function` of your own."""
    weight: float = 1.0
    """Factor of its number in the score."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the function, by name."""


def _as_functions(value: Any) -> Any:
    if isinstance(value, str):
        return [{"name": value}]
    if isinstance(value, Mapping):
        return [{"name": name, "weight": weight} for name, weight in value.items()]
    return [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value


class Data(Section):
    """Rows of JSONL or Parquet files, or of a Hugging Face data set, as tasks."""

    train_files: Names | None = None
    """Training rows: files (JSONL, Parquet), folders of the datasets library, or names of the hub."""
    val_files: Names | None = None
    """Validation rows, in the same forms."""
    num_epochs: PositiveCount | None = None
    """Times that each training row is played; the run ends when the rows do, if max_steps doesn't end it before."""
    curriculum: bool = False
    """Rows and environment tags are drawn by what there is to learn from them, measured by their success."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of messages."""
    agent_name_key: str = "agent_name"
    """Column that names the agent of a row."""
    default_agent: AgentName = "single_turn_agent"
    """The agent of rows that name none."""
    reward: Annotated[list[RewardFunction], BeforeValidator(_as_functions)] = Field(default_factory=list)
    """Rewards of every episode: a list of {name, weight, args}, a mapping {name: weight}, or one name."""
    reward_timeout_s: Seconds = 60.0
    """Time of one call of a reward, which scores a group."""
    max_prompt_length: PositiveCount | None = None
    """Rows whose prompt has more tokens are left out, and counted [what sequence_length leaves beside a response]."""
    shuffle: bool = True
    """Training rows come in a new order each epoch."""


class Agent(Section):
    """Agents of rows: tools and simulated users, their limits, and loops of your own."""

    tool_config_path: str | None = None
    """YAML file of tools: `tools`, a list of {class_name, config, tool_schema}."""
    function_tool_path: str | None = None
    """Python file whose public functions are tools."""
    interaction_config_path: str | None = None
    """YAML file of simulated users: `interaction`, a list of {name, class_name, config}."""
    agent_config_path: str | None = None
    """YAML file of your own agent loops: a list of {name, _target_, and its arguments}."""
    tool_parser: Annotated[str, AfterValidator(OneOf(TOOL_PARSERS, own="module:Class"))] | None = None
    """Form of the tool calls in the model's text [the one that its chat template writes]."""
    max_assistant_turns: PositiveCount | None = None
    """Responses of an episode at most [what sequence_length holds]."""
    max_user_turns: PositiveCount | None = None
    """Messages of a simulated user at most [what sequence_length holds]."""
    max_parallel_calls: PositiveCount = 1
    """Calls of one response that are executed, at the same time; the model reads that the others weren't."""
    max_tool_response_length: PositiveCount = 1024
    """Characters of a tool's result that are shown."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """The part of a longer result that is removed."""
    tool_timeout_s: Seconds = 60.0
    """Time of one call of a tool or a simulated user, and of making and releasing its state."""
