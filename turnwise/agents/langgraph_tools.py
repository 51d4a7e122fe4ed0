"""The tools of a row as LangChain's tools, and their limits in a graph."""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from langchain.agents.middleware import AgentMiddleware, hook_config
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, ToolException
from pydantic import Field

from turnwise.agents.graph_calls import GraphCalls
from turnwise.tools.tool_box import MISTAKES, readable

_CALL_ID: ContextVar[str | None] = ContextVar("_CALL_ID", default=None)
"""The id of the call that is being executed."""


class RowTool(BaseTool):
    """A tool of the row's tool box: with its state, deadline, places, limits and metrics."""

    calls: Any = Field(exclude=True, repr=False)
    shown_schema: Mapping[str, Any] = Field(exclude=True, repr=False)
    """The schema as the prompt shows it."""

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        token = _CALL_ID.set(_id_of(input))
        try:
            return super().invoke(input, config, **kwargs)
        finally:
            _CALL_ID.reset(token)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        token = _CALL_ID.set(_id_of(input))
        try:
            return await super().ainvoke(input, config, **kwargs)
        finally:
            _CALL_ID.reset(token)

    def _run(self, /, **arguments: Any) -> str:
        calls: GraphCalls = self.calls
        return calls.result_blocking(self.name, arguments, _CALL_ID.get())

    async def _arun(self, /, **arguments: Any) -> str:
        calls: GraphCalls = self.calls
        return await calls.result(self.name, arguments, _CALL_ID.get())


def row_tools(calls: GraphCalls) -> list[RowTool]:
    """The tools of an episode's row."""
    tools = []
    for schema in calls.schemas:
        function = schema["function"]
        tools.append(
            RowTool(
                name=function["name"],
                description=function.get("description") or "",
                args_schema=dict(function.get("parameters") or {"type": "object", "properties": {}}),
                calls=calls,
                shown_schema=schema,
            )
        )
    return tools


class CallLimits(AgentMiddleware):
    """Holds LangChain's own tools in a graph of `create_agent` to the limits that a row's tools have: their
    number a response, and the length of results. Mistakes of the model, and calls that can't be read, are
    answered by a sentence."""

    def __init__(self, calls: GraphCalls) -> None:
        super().__init__()
        self._calls = calls

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Shows the model why its calls can't be read, if it made no other ones: LangChain's agent would
        end."""
        answer = state["messages"][-1]
        if not isinstance(answer, AIMessage) or answer.tool_calls or not answer.invalid_tool_calls:
            return None
        if answer.response_metadata.get("finish_reason") == "length":
            return None
        errors = [readable(str(call["error"])) for call in answer.invalid_tool_calls]
        text = self._calls.shortened("\n".join(errors))
        return {"messages": [HumanMessage(text)], "jump_to": "model"}

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        if isinstance(request.tool, RowTool):
            return handler(request)
        if refusal := self._calls.refusal(request.tool_call["id"]):
            return _message(request, refusal, is_error=True)
        try:
            result = handler(request)
        except (*MISTAKES, ToolException) as mistake:
            return self._mistake(request, mistake)
        return self._shortened(request, result)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        if isinstance(request.tool, RowTool):
            return await handler(request)
        if refusal := self._calls.refusal(request.tool_call["id"]):
            return _message(request, refusal, is_error=True)
        try:
            result = await handler(request)
        except (*MISTAKES, ToolException) as mistake:
            return self._mistake(request, mistake)
        return self._shortened(request, result)

    def _mistake(self, request: Any, mistake: BaseException) -> ToolMessage:
        name = request.tool_call["name"]
        text = f"Error executing {name!r}: {str(mistake) or type(mistake).__name__}"
        return _message(request, self._calls.shortened(readable(text)), is_error=True)

    def _shortened(self, request: Any, result: Any) -> Any:
        if not isinstance(result, ToolMessage) or not isinstance(result.content, str):
            return result
        text = self._calls.shortened(readable(result.content))
        self._calls.tell(request.tool_call["name"], request.tool_call["args"], text)
        return result.model_copy(update={"content": text})


def _message(request: Any, text: str, is_error: bool) -> ToolMessage:
    call = request.tool_call
    status = "error" if is_error else "success"
    return ToolMessage(content=text, name=call["name"], tool_call_id=call["id"], status=status)


def _id_of(call: Any) -> str | None:
    if isinstance(call, Mapping) and call.get("type") == "tool_call":
        return call.get("id")
    return None
