"""The default graph of `react_agent`, and how a graph of LangGraph is started and ended."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.errors import GraphRecursionError

from turnwise.agents.graph_calls import GraphCalls
from turnwise.agents.langgraph_messages import as_openai, as_prompt
from turnwise.agents.langgraph_model import ChatModel
from turnwise.agents.langgraph_tools import CallLimits, row_tools
from turnwise.agents.model_calls import ModelCalls
from turnwise.errors import EnvironmentFault
from turnwise.types import Message


def react_graph(model: ChatModel, tools: Sequence[Any]) -> Any:
    """LangChain's agent: the model calls tools until an answer has no calls."""
    return create_agent(model, list(tools), middleware=[CallLimits(model.graph_calls)])


def model_of(model_calls: ModelCalls, calls: GraphCalls) -> ChatModel:
    """The policy as LangChain's model."""
    return ChatModel(client=model_calls, graph_calls=calls)


def tools_of_episode(calls: GraphCalls, others: Sequence[Any]) -> list[Any]:
    """The row's tools, and those that the class of the agent has itself. Raises EnvironmentFault if two have
    the same name."""
    tools: list[Any] = [*row_tools(calls), *others]
    names = [_name(tool) for tool in tools]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise EnvironmentFault(
            f"two tools of a graph are called {', '.join(doubled)}; a call names one tool, so rename one"
        )
    return tools


def inputs_of(messages: Sequence[Message]) -> dict[str, Any]:
    """What a graph is started with."""
    return {"messages": as_prompt(messages)}


def messages_of(state: Any, agent: str) -> list[Message]:
    """The messages of the state that a graph has returned. Raises EnvironmentFault if it has none."""
    messages = state.get("messages") if isinstance(state, Mapping) else None
    if not isinstance(messages, Sequence) or not all(isinstance(each, BaseMessage) for each in messages):
        raise EnvironmentFault(
            f"the graph of {agent} returned {str(state)[:80]!r}; a graph returns a state whose `messages` "
            "are a list of LangChain's messages"
        )
    return as_openai(messages)


def is_endless(fault: BaseException) -> bool:
    """Whether a graph was ended because it took too many steps."""
    return isinstance(fault, GraphRecursionError)


def _name(tool: Any) -> str:
    if isinstance(tool, BaseTool):
        return tool.name
    return str(convert_to_openai_tool(tool)["function"]["name"])
