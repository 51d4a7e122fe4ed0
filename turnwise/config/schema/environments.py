"""Settings of tasks: environments by tag, how many play at once, rows of data sets, and agents with tools."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from turnwise.config.read.agent_files import Target as ToolTarget
from turnwise.config.schema.gateway import EntryPoint, GatewayPlay, gateway_arguments
from turnwise.config.schema.model_args import GeneratingArgs
from turnwise.config.schema.row_shape import RowShape
from turnwise.config.schema.section import (
    Count,
    Fraction,
    Name,
    Names,
    OneOf,
    PositiveCount,
    Seconds,
    Section,
    aliased,
    as_list,
    derived,
    is_entry_point,
)
from turnwise.spec import (
    AGENT_ALIASES,
    AGENTS,
    CHECKED_REWARDS,
    DEFAULT_ACTION_PATTERN,
    DEFAULT_SYSTEM_TEMPLATE,
    REWARDS,
    ROWS_TAG,
    TOOL_PARSERS,
    ContextMode,
)


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} isn't a regular expression: {error}") from None
    return pattern


def _env_type(name: str) -> str:
    if ":" in name and not is_entry_point(name):
        raise ValueError(f"{name!r} isn't in this version's registry, nor your own module:Class")
    return name


AgentName = Annotated[str, aliased(AGENT_ALIASES), AfterValidator(OneOf(AGENTS, form="module:Class"))]


class CustomEnv(Section):
    """One kind of task: the environment, what the model is told about it, and its limits."""

    env_type: Annotated[Name, AfterValidator(_env_type)]
    """A registered name (`frozen_lake`) or `module:Class`."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment (`size`, `is_slippery`, `observation`, `format_penalty` …)."""
    max_steps: PositiveCount = 10
    """Maximum actions per episode (alias `max_actions_per_traj`)."""
    max_tokens_per_step: PositiveCount | None = None
    """Maximum tokens per response; the smaller of this and max_new_tokens applies [max_new_tokens]."""
    agent_name: AgentName = "env_agent"
    """The agent loop that plays the environment."""
    agent_args: Annotated[dict[str, Any], AfterValidator(gateway_arguments)] = Field(default_factory=dict)
    """Keys of `agent` for agent_name: gateway (`play`, `models`, `grace_s` …), which win in this
    environment."""
    mode: ContextMode = "trajectory"
    """`trajectory`: one growing context per episode. `step`: a fresh context for each turn, so that each turn
    is a sample."""
    history_length: Count | None = None
    """Maximum number of earlier turns that {history} shows in mode step; unset = all."""
    agent_system_template: str = DEFAULT_SYSTEM_TEMPLATE
    """System message, used verbatim; empty = none."""
    agent_template: str = derived()
    """User message of a turn [the mode's template in turnwise/spec/spec.yaml]. {observation} {turn_idx}
    {actions_left} {max_response_length} {suffix} are filled in, and in mode step also {history}
    {history_length} {step_count} {current_step} {current_observation}. {env_instruction} places the
    environment's rules, which otherwise open a context's first message."""
    action_pattern: Annotated[str, AfterValidator(_compiles)] | None = DEFAULT_ACTION_PATTERN
    """Regular expression whose last group is the action; `null` = the action is all text outside
    `<think>`."""
    encode_special_tokens: bool | None = None
    """Whether special tokens that a user message or an observation spells out become those tokens; false =
    they stay ordinary text, so that no environment can forge a turn [true; false for environments that relay
    foreign text]."""
    use_thread_lock: bool = False
    """For environments that block and can't be called at the same time: each gets a thread, and one call runs
    at a time."""
    tools: list[str] | None = None
    """Refused: this version has tools for rows of data, not for environments."""


class EnvManager(Section):
    """The environments of one split: which are played, how many at once, and what happens when an episode
    fails."""

    num_env_groups: PositiveCount = 8
    """Groups played at the same time."""
    group_size: PositiveCount = 8
    """Number of siblings, the episodes of one task that make a group [8; 1 for validation]."""
    group_size_redundancy: Count = 0
    """Episodes started beyond group_size; the first group_size to finish make the group."""
    tags: list[str] = derived()
    """Keys of custom_envs that are played, and `data` for rows of data files [all; for validation those of
    training]."""
    num_groups_partition: list[Count] = derived()
    """Number of groups of each tag; they add up to num_env_groups [as equal as possible]."""
    generating_args: GeneratingArgs = Field(default_factory=GeneratingArgs)
    """Sampling of this split; keys left out are actor_infer's."""
    max_env_num_per_worker: Count = 0
    """Environments of a tag that live in one worker process, each in a thread of it; more than four workers a
    core are cut to that. 0 = environments are called on the event loop, so none may block."""
    max_env_retries: Count = 2
    """Retries of a failed episode, with the same seed."""
    env_step_timeout_s: Seconds = 60.0
    """Time limit of one call: the constructor, reset, step, close."""
    episode_timeout_s: Seconds = 3600.0
    """Time limit of one episode. When time is up, env_agent truncates the episode after its last finished
    turn. An episode of another agent, or without a finished turn, fails."""
    max_failed_fraction: Fraction = 0.2
    """The run stops if a larger share of a batch's episodes fails."""

    @property
    def env_tags(self) -> list[str]:
        """The tags of environments: all tags except `data`, the tag of rows."""
        return [tag for tag in self.tags if tag != ROWS_TAG]

    @property
    def has_rows(self) -> bool:
        """Whether rows of `data` are played."""
        return ROWS_TAG in self.tags


class RewardFunction(Section):
    """One reward and its weight."""

    name: Annotated[str, AfterValidator(OneOf(REWARDS, form="module:function"))]
    """A registered name, or your own `module:function`."""
    weight: float = 1.0
    """Factor of the reward in the score."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the function, by name."""
    form: Literal["text", "messages"] | None = None
    """What the function's `completions` are: texts, or lists of messages as TRL's [`text`; `messages` for
    trl.rewards]."""


def _as_functions(value: Any) -> Any:
    if isinstance(value, str):
        return [{"name": value}]
    if isinstance(value, Mapping):
        return [{"name": name, "weight": weight} for name, weight in value.items()]
    if isinstance(value, list):
        return [{"name": item} if isinstance(item, str) else item for item in value]
    return value


class Data(RowShape):
    """Rows of JSONL or Parquet files, or of Hugging Face data sets, as tasks."""

    train_files: Names | None = None
    """Training rows: JSON, CSV or Parquet files, folders saved by the datasets library, or names of data sets
    on the hub."""
    val_files: Names | None = None
    """Validation rows, in the same forms."""
    num_epochs: PositiveCount | None = None
    """How often each training row is played before the run ends, if max_steps doesn't end it first; unset =
    no limit."""
    curriculum: bool = False
    """Draw rows and environment tags more often if their success rate is near one half."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of messages."""
    agent_name_key: str = "agent_name"
    """Column that names the agent of a row."""
    default_agent: AgentName = "single_turn_agent"
    """The agent of rows that name none."""
    reward: Annotated[list[RewardFunction], BeforeValidator(_as_functions)] = Field(default_factory=list)
    """Rewards of every episode: a list of names or {name, weight, args}, a mapping {name: weight}, or one
    name."""
    checker: Literal["text", "math_verify"] = "text"
    """Who compares the answers in `accuracy`, `length_penalty`, `step`, `combined`: the text reader, or also
    math-verify."""
    reward_timeout_s: Seconds = 60.0
    """Time limit of one call of a reward, which scores a group."""
    max_prompt_length: PositiveCount | None = None
    """Rows with more prompt tokens are left out [sequence_length − max_new_tokens; sequence_length / 2 if
    that is ≤ 0]."""
    shuffle: bool = True
    """Training rows come in a new order each epoch."""

    @property
    def checkers(self) -> set[str]:
        """The checkers of the rewards that compare answers."""
        return {
            reward.args.get("checker", self.checker)
            for reward in self.reward
            if reward.name in CHECKED_REWARDS
        }


class Agent(GatewayPlay):
    """Agents that play the rows of a data set: tools, simulated users, limits, your own agent loops, and
    agents over HTTP."""

    tools: Annotated[list[ToolTarget], BeforeValidator(as_list)] = Field(default_factory=list)
    """Tools without settings: registered names, or your own `module:function`, `module:Class` or
    `module:object`."""
    tool_config_path: str | None = None
    """YAML file of tools: `tools`, a list of {class_name, config, tool_schema}."""
    function_tool_path: str | None = None
    """Python file whose public functions are tools."""
    interaction_config_path: str | None = None
    """YAML file of simulated users: `interaction`, a list of {name, class_name, config}."""
    agent_config_path: str | None = None
    """YAML file of your own agent loops: a list of {name, _target_, and its arguments}."""
    graph: EntryPoint | None = None
    """The function that makes the graph of `react_agent`: `module:function`, called with the model and the
    tools [LangChain's `create_agent`]."""
    tool_parser: Annotated[str, AfterValidator(OneOf(TOOL_PARSERS, form="module:Class"))] | None = None
    """Form of the tool calls in the model's text [the one that its chat template writes]."""
    max_assistant_turns: PositiveCount | None = None
    """Maximum responses per episode [as many as fit into sequence_length]."""
    max_user_turns: PositiveCount | None = None
    """Maximum messages of a simulated user per episode [as many as fit into sequence_length]."""
    max_parallel_calls: PositiveCount = 1
    """Maximum tool calls of one response that run, all at the same time; the model is told that further ones
    weren't run."""
    max_tool_response_length: PositiveCount = 1024
    """Maximum characters of a tool's result that the model is shown."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """The part of a longer result that is removed."""
    tool_timeout_s: Seconds = 60.0
    """Time limit of each call of a tool or a simulated user, and of creating and releasing its state."""

    @property
    def has_tools(self) -> bool:
        """Whether a key or a file names tools."""
        return bool(self.tools or self.tool_config_path or self.function_tool_path)
