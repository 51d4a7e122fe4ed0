"""What a config names, read once: `examine(config)`."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.read.agent_files import LoopEntry
from turnwise.data.rewards import WeightedReward
from turnwise.examine.demonstrations import Demonstrations, read_demonstrations
from turnwise.examine.files import named_files
from turnwise.examine.graphs import load_graph
from turnwise.examine.prompts import PromptLimit
from turnwise.examine.rewards import make_rewards
from turnwise.examine.rows import RowParts, Rows, read_loops, read_rows
from turnwise.examine.tools import make_tools, make_users
from turnwise.rollout.group_filter import GroupFilter, load_group_filter
from turnwise.tools.interactions import Interactions
from turnwise.tools.tool_box import ToolBox
from turnwise.types import Split

if TYPE_CHECKING:
    from turnwise.examine.policy import PolicyFiles


class Examined:
    """The objects and files that the config of a run names. Each is read, checked and made when it is first
    asked for, and is the same object from then on, so that `turnwise config` and the run agree. A part raises
    TurnwiseError if it is wrong."""

    def __init__(self, config: AgenticConfig) -> None:
        self.config = config
        self.prepared: set[object] = set()
        """The users' classes whose `init_class` has been called."""
        self._notes: list[str] = []
        self._rows: dict[Split, Rows] = {}
        self._policies: dict[str, PolicyFiles] = {}

    @cached_property
    def tools(self) -> ToolBox:
        """The tools that agents may call. Nobody watches or times their calls yet (`ToolBox.watched`)."""
        return make_tools(self.config, self._notes)

    @property
    def notes(self) -> list[str]:
        """Sentences about what is left out of the tools, for the log of the run."""
        _ = self.tools
        return self._notes

    @cached_property
    def users(self) -> Interactions:
        """The simulated users, by the name under which rows choose them."""
        return make_users(self.config)

    @cached_property
    def rewards(self) -> list[WeightedReward]:
        """The entries of `data.reward` except the reward model, which read the recorded texts of
        responses."""
        return make_rewards(self.config)

    @cached_property
    def loops(self) -> Mapping[str, LoopEntry]:
        """The agent loops of `agent.agent_config_path`, by name."""
        return read_loops(self.config)

    @cached_property
    def make_graph(self) -> Callable[..., Any] | None:
        """The function of `agent.graph`; None if it is unset."""
        return load_graph(self.config)

    @cached_property
    def group_filter(self) -> GroupFilter | None:
        """The function of `group_filter`; None if it is unset."""
        return load_group_filter(self.config.group_filter)

    def rows(self, split: Split) -> Rows:
        """The rows of a split that has some. Raises DataError if rows are wrong."""
        if split not in self._rows:
            _ = self.make_graph  # rows may name the agent that it is for
            parts = RowParts(self.tools, self.users, self.rewards, self.loops)
            self._rows[split] = read_rows(self.config, split, parts)
        return self._rows[split]

    def prompt_limit(self, split: Split) -> PromptLimit:
        """The maximum length of the prompts of a split's rows for the config's own policy."""
        template = self.policy().template
        return PromptLimit.of(self.config, split, template, self.tools.schemas)

    def policy(self, path: str | None = None) -> "PolicyFiles":
        """The files of the policy at `path`, by default the config's. Imports transformers."""
        from turnwise.examine.policy import read_policy

        name = path or self.config.actor_train.model_args.model_name_or_path
        if name not in self._policies:
            self._policies[name] = read_policy(self.config, name)
        return self._policies[name]


class ExaminedSFT:
    """The files that the config of supervised fine-tuning names, each read when it is first asked for."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        self._sources: dict[tuple[str, str], Demonstrations] = {}

    def source(self, key: str, name: str) -> Demonstrations:
        """The demonstrations of one source of `train_files` or `val_files`. Raises DataError if the source
        can't be used."""
        if (key, name) not in self._sources:
            self._sources[key, name] = read_demonstrations(self.config, key, name)
        return self._sources[key, name]

    def demonstrations(self, key: str) -> Demonstrations:
        """The demonstrations of all sources of `train_files` or `val_files`, in their order."""
        whole = Demonstrations()
        for name in named_files(self.config)[key]:
            whole.extend(self.source(key, name))
        return whole


@overload
def examine(config: AgenticConfig) -> Examined: ...
@overload
def examine(config: SFTConfig) -> ExaminedSFT: ...
def examine(config: AgenticConfig | SFTConfig) -> Examined | ExaminedSFT:
    """What the config names. Nothing is read yet; `examine.problems` asks for all parts and lists their
    faults."""
    if isinstance(config, SFTConfig):
        return ExaminedSFT(config)
    return Examined(config)
