"""Classes under the names that published systems give them, for users' agent loops that are written with
these (docs/langgraph.md). `recipe.langgraph_agent.react_agent_loop` and `verl.experimental.agent_loop` stand
for this module where they aren't installed."""

from typing import Any

from turnwise.agents.react_agent import ReactAgentLoop
from turnwise.agents.single_turn_agent import SingleTurnAgent as SingleTurnAgentLoop
from turnwise.agents.tool_agent import ToolAgent as ToolAgentLoop
from turnwise.inference.server_manager import AsyncLLMServerManager, AsyncServer
from turnwise.published.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
    TokenOutput,
    register,
    rollout_trace_op,
    simple_timer,
)

RectAgentLoop = ReactAgentLoop

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "AsyncServer",
    "ReactAgentLoop",
    "RectAgentLoop",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "ToolAgentLoop",
    "register",
    "rollout_trace_op",
    "simple_timer",
]


def __getattr__(name: str) -> Any:
    if name == "ChatModel":  # LangChain is an extra
        from turnwise.agents.langgraph_model import ChatModel

        return ChatModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
