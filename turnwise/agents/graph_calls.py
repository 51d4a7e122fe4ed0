"""The calls of tools in an episode of a graph: limits, results, and who is told of them."""

from collections.abc import Mapping
from typing import Any

from turnwise.agents.model_calls import ModelCalls
from turnwise.agents.tool_agent import ToldSession, ToolAgentLimits, not_executed, shortened
from turnwise.protocols import HearsCalls
from turnwise.tools.tool_box import readable


class GraphCalls:
    """Executes the calls of a graph in the tools of its row, on any thread."""

    def __init__(self, session: ToldSession, limits: ToolAgentLimits, model_calls: ModelCalls) -> None:
        self.schemas = session.schemas
        self._session = session
        self._limits = limits
        self._model_calls = model_calls

    async def result(self, name: str, arguments: Mapping[str, Any], call_id: str | None) -> str:
        """The text that the model is shown in answer to a call."""
        return await self._model_calls.run_loop.awaited(self._result(name, arguments, call_id))

    def result_blocking(self, name: str, arguments: Mapping[str, Any], call_id: str | None) -> str:
        """Like `result`, for threads without an event loop. Raises BlockingFault on the run's own loop."""
        return self._model_calls.run_loop.blocking(
            lambda: self._result(name, arguments, call_id), f"a synchronous call of {name}", "use ainvoke"
        )

    def refusal(self, call_id: str | None) -> str:
        """The sentence for a call beyond `max_parallel_calls`; "" for one that may be executed."""
        max_calls = self._limits.max_parallel_calls
        if self._model_calls.position(call_id) < max_calls:
            return ""
        return not_executed(max_calls)

    def shortened(self, text: str) -> str:
        """The text of a result as the model is shown it."""
        limits = self._limits
        return shortened(text, limits.max_tool_response_length, limits.tool_response_truncate_side)

    def tell(self, name: str, arguments: Mapping[str, Any], text: str, seconds: float = 0.0) -> None:
        """Tells those who observe the episode of a call outside the row's tools."""
        if isinstance(self._session.contexts, HearsCalls):
            self._session.contexts.called(name, arguments, text, seconds)

    async def _result(self, name: str, arguments: Mapping[str, Any], call_id: str | None) -> str:
        if refusal := self.refusal(call_id):
            return refusal
        result = await self._session.call(name, arguments)
        return self.shortened(readable(result.text))
