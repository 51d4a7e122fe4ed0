"""LangChain's chat model over the tree of an episode, so that every graph that calls it is trained on exact
tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field

from turnwise.agents.langgraph_messages import as_ai_message, as_openai
from turnwise.agents.langgraph_tools import RowTool
from turnwise.agents.model_calls import ModelCalls
from turnwise.chat.tree import Answer

_OWN_SETTINGS = ("max_tokens", "temperature", "top_p", "repetition_penalty")


class ChatModel(BaseChatModel):
    """The policy as a LangChain chat model. It is called with all messages so far, and finds by their content
    what they continue; nothing of an episode is kept in messages, so graphs may copy, trim, checkpoint and
    summarise them.

    `client` is what answers: the `ModelCalls` of the episode. Asynchronous calls work on every event loop,
    synchronous ones in every thread but that of the run's loop. How to sample is the run's to say, so
    `temperature`, `top_p` and `repetition_penalty` are ignored, which is logged once; `max_tokens` may lower
    the maximum of a response. Source: the class of this name in the LangGraph recipe of verl."""

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True, protected_namespaces=())

    client: Any = Field(exclude=True, repr=False)
    graph_calls: Any = Field(default=None, exclude=True, repr=False)
    """The `GraphCalls` of the episode, which hold its tools' limits."""
    model_name: str = Field(default="policy", alias="model")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    cache: BaseCache | bool | None = Field(default=False, exclude=True)
    """Answers of a cache wouldn't be sampled."""

    @property
    def _llm_type(self) -> str:
        return "turnwise"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with these tools in its prompt: functions, pydantic classes, LangChain's tools, or
        schemas. A `tool_choice` can't be enforced while the policy samples."""
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=[_schema(tool) for tool in tools], **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        tools = kwargs.pop("tools", None) or ()
        return self._result(
            self._calls.answer_blocking(as_openai(messages), self._arguments(stop, kwargs), tools)
        )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        tools = kwargs.pop("tools", None) or ()
        return self._result(
            await self._calls.answer(as_openai(messages), self._arguments(stop, kwargs), tools)
        )

    @property
    def _calls(self) -> ModelCalls:
        calls: ModelCalls = self.client
        return calls

    def _arguments(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN_SETTINGS}
        return {**own, **kwargs, "stop": stop}

    def _result(self, answer: Answer) -> ChatResult:
        message = as_ai_message(answer, self.model_name)
        return ChatResult(generations=[ChatGeneration(message=message)])


def _schema(tool: Any) -> Mapping[str, Any]:
    # The prompt must show our tools as `tool_agent` shows them.
    if isinstance(tool, RowTool):
        return tool.shown_schema
    return convert_to_openai_tool(tool)
