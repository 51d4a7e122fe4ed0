"""The agent of rows that is a LangGraph graph: by default LangChain's `create_agent` over the row's tools, or
a graph of the user's own."""

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from turnwise.agents.graph_calls import GraphCalls
from turnwise.agents.model_calls import ModelCalls, RequestSettings, SaidOnce
from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToldSession, ToolAgentLimits
from turnwise.chat.contexts import opens_trees
from turnwise.chat.tree import ConversationTree
from turnwise.data.prompts import prompt_of
from turnwise.errors import EnvironmentFault, NotAvailableError, RolloutError, install_hint
from turnwise.protocols import OpenConversation
from turnwise.runtime.threads import DaemonPool
from turnwise.tools.interactions import Interactions, InteractionSession
from turnwise.tools.tool_box import ToolBox
from turnwise.types import Limit, Message, SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from turnwise.agents.langgraph_model import ChatModel

MAX_CALLS = 100
"""The most calls of the model in an episode if `agent.max_assistant_turns` is unset."""
STEPS_PER_CALL = 10
"""The steps that a graph may take for each call of the model. More are a loop that doesn't end."""
OLDEST = (1, 2)
"""The oldest version of LangGraph that is supported."""
TESTED = (1, 2)
"""The newest version of LangGraph that was tested."""
TRACING = ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING", "LANGCHAIN_TRACING_V2")
"""Variables that make LangChain send what is played to LangSmith."""

MakeGraph = Callable[[Any, Sequence[Any]], Any]
"""Called with the model and the tools, returns a graph: an object with `ainvoke` or `invoke`."""


@runtime_checkable
class AsyncGraph(Protocol):
    """A graph that is awaited."""

    async def ainvoke(self, inputs: Mapping[str, Any], config: Any) -> Any: ...


@runtime_checkable
class SyncGraph(Protocol):
    """A graph that blocks the thread that calls it."""

    def invoke(self, inputs: Mapping[str, Any], config: Any) -> Any: ...


class ReactAgentLoop:
    """Plays a row as a graph, whose model is the policy. Every call of the model is a response of the
    episode's tree, so the graph may branch, loop, call sub-graphs, and rewrite its messages.

    `build` makes the graph of an episode: that of `make_graph` (the function that `agent.graph` names), else
    LangChain's `create_agent`. A subclass overrides it, or sets LangChain tools of its own as `tools` in
    `init_class`, which is called once. A graph without `ainvoke`, or of a class with `runs_in_thread`, is
    invoked in a thread of its own.

    A limit truncates the episode. An exception of the graph fails it, unless it's one of
    `RequestSettings.mistakes`: these are the model's doing, and end the episode with a reward."""

    tools: ClassVar[Sequence[Any]] = ()
    """LangChain tools beside those of the row."""
    runs_in_thread: ClassVar[bool] = False
    _class_initialized: ClassVar[bool] = False

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Called once, before the first agent of the class is made, with the run's settings by their
        published names, and the tokenizer."""

    def __init__(
        self,
        settings: RowAgentSettings,
        *,
        tools: ToolBox,
        limits: ToolAgentLimits,
        interactions: Interactions | None = None,
        requests: RequestSettings | None = None,
        make_graph: MakeGraph | None = None,
    ) -> None:
        require_langgraph()
        self._settings = settings
        self._box = tools
        self._limits = limits
        self._interactions = interactions or Interactions()
        self._requests = requests or RequestSettings()
        self._make_graph = make_graph
        self._notes = SaidOnce()
        self._threads = DaemonPool("graph")
        warn_of_version(self._notes)
        warn_of_tracing(self._notes)

    def build(self, model: "ChatModel", tools: Sequence[Any]) -> Any:
        """The graph of one episode. It gets `{"messages": …}` and returns its state, which has `messages`."""
        if self._make_graph is not None:
            return self._make_graph(model, tools)
        from turnwise.agents.langgraph_graph import react_graph

        return react_graph(model, tools)

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """One trajectory: finished by the end of the graph, or truncated by a limit."""
        settings = self._settings
        requests = self._requests
        name = type(self).__name__
        tree = opens_trees(open_conversation, name).open_tree(
            sampling, match=requests.match, max_turns=self._max_calls
        )
        async with (
            self._box.open(task) as session,
            self._interactions.open(task, sibling, settings.max_user_turns) as user,
        ):
            max_new_tokens = min(settings.max_new_tokens, sampling.max_new_tokens)
            model_calls = ModelCalls(tree, requests, max_new_tokens, self._notes)
            calls = GraphCalls(ToldSession(session, open_conversation), self._limits, model_calls)
            prompt = prompt_of(task.payload, settings.prompt_key, session.schemas)
            ending = _Ending(tree, requests.mistakes)
            with ending:
                await self._converse(f"{task.id}/{sibling}", user, model_calls, calls, prompt)
            rewards = await session.rewards()
            user_metrics = await user.metrics()
        _require_turns(tree, name)
        trajectory = tree.trajectory(task, sibling)
        limit = trajectory.limit or ending.limit or user.limit or model_calls.cut_by(trajectory.answer_turn)
        if limit is not None:
            trajectory.status = "truncated"
            trajectory.limit = limit
        trajectory.outcome_rewards = {f"tool/{name}": reward for name, reward in rewards.items()}
        if ending.is_mistake:
            trajectory.outcome_rewards["mistake"] = requests.mistake_reward
        for figure in ("tool_calls", "unreadable_calls"):
            # A call that the graph has cancelled is sampled to its end, and nobody reads the response.
            trajectory.metrics[figure] = sum(turn.metrics.get(figure, 0.0) for turn in tree.turns)
        trajectory.metrics["mistakes"] = float(ending.is_mistake)
        counts = dict(tree.counts) | dict(model_calls.counts)
        trajectory.metrics |= {f"calls/{name}": float(number) for name, number in counts.items()}
        trajectory.metrics |= session.metrics
        trajectory.metrics |= user_metrics
        return [trajectory]

    @property
    def _max_calls(self) -> int:
        return self._settings.max_assistant_turns or MAX_CALLS

    async def _converse(
        self,
        name: str,
        user: InteractionSession,
        model_calls: ModelCalls,
        calls: GraphCalls,
        messages: Sequence[Message],
    ) -> None:
        """Plays the graph, and again after each message of the simulated user."""
        from turnwise.agents import langgraph_graph

        model = langgraph_graph.model_of(model_calls, calls)
        tools = langgraph_graph.tools_of_episode(calls, type(self).tools)
        graph = self.build(model, tools)
        transcript = list(messages)
        while messages:
            state = await self._played(graph, langgraph_graph.inputs_of(transcript), name)
            transcript = langgraph_graph.messages_of(state, type(self).__name__)
            if not user.is_there or not model_calls.turns:
                return
            messages = await user.reply(transcript, model_calls.turns[-1])
            transcript = [*transcript, *messages]

    async def _played(self, graph: Any, inputs: Mapping[str, Any], name: str) -> Any:
        """The state at the end of the graph."""
        options = {
            # LangGraph's own default, 25 steps, would end an episode without a word.
            "recursion_limit": STEPS_PER_CALL * self._max_calls,
            # A graph with a checkpointer asks for it.
            "configurable": {"thread_id": name},
        }
        if isinstance(graph, AsyncGraph) and not self.runs_in_thread:
            return await graph.ainvoke(inputs, options)
        if not isinstance(graph, SyncGraph):
            raise EnvironmentFault(
                f"the graph of {type(self).__name__} is {graph!r:.80}; it must have the method ainvoke or "
                "invoke, as a compiled graph has: call compile()"
            )
        return await self._threads.call(graph.invoke, inputs, options)


class _Ending:
    """How an episode of a graph ended. A limit, or a mistake of the model, ends it well; every other
    exception passes."""

    limit: Limit | None = None
    is_mistake = False

    def __init__(self, tree: ConversationTree, mistakes: tuple[type[BaseException], ...]) -> None:
        self._tree = tree
        self._mistakes = mistakes

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> bool:
        from turnwise.agents.langgraph_graph import is_endless

        if not isinstance(fault, Exception):
            return False
        if not self._tree.turns:
            if self._tree.limit is not None:
                raise RolloutError(str(fault)) from fault
            return False
        # A graph may raise something else when the model refuses to answer.
        if self._tree.limit is not None:
            self.limit = self._tree.limit
        elif is_endless(fault):
            self.limit = "max_steps"
        else:
            self.is_mistake = isinstance(fault, self._mistakes)
        return self.limit is not None or self.is_mistake


def _require_turns(tree: ConversationTree, agent: str) -> None:
    if not tree.turns:
        raise EnvironmentFault(
            f"the graph of {agent} ended without calling the model that it was built with, so there is "
            "nothing to train on; does it use a model of its own?"
        )


def require_langgraph() -> None:
    """Raises NotAvailableError if LangGraph isn't installed, or is older than what is supported."""
    try:
        version = importlib.metadata.version("langgraph")
        importlib.metadata.version("langchain")
    except importlib.metadata.PackageNotFoundError as error:
        raise NotAvailableError(
            f"react_agent needs LangGraph and LangChain, and {error.name} isn't installed; "
            f"{install_hint('langgraph')}"
        ) from error
    if _number(version) < OLDEST:
        raise NotAvailableError(
            f"react_agent needs langgraph {OLDEST[0]}.{OLDEST[1]} or newer, and {version} is installed; "
            f"{install_hint('langgraph')}"
        )


def _number(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> _number("1.2.24")
    (1, 2)
    """
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def warn_of_version(notes: SaidOnce) -> None:
    """Warns of a LangGraph that is newer than what was tested."""
    version = importlib.metadata.version("langgraph")
    if _number(version) > TESTED:
        notes.warn(
            f"langgraph {version} is newer than {TESTED[0]}.{TESTED[1]}, with which react_agent was tested; "
            f"{install_hint('langgraph')} installs that one"
        )


def warn_of_tracing(notes: SaidOnce) -> None:
    """Warns if LangChain is set to send what is played to a service."""
    for variable in TRACING:
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            notes.warn(f"{variable} is set: LangChain sends the episodes to LangSmith, off this machine")
