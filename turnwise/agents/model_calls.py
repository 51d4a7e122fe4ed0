"""The model of one episode, for agents that keep their own messages and send all of them with each call. No
agent framework is needed here; `langgraph_model.ChatModel` is LangChain's form of it."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.agents.run_loop import RunLoop
from turnwise.chat.tree import Answer, ConversationTree
from turnwise.errors import RequestError
from turnwise.spec import MatchRule
from turnwise.types import CallOptions, Limit, Message, Turn

logger = logging.getLogger(__name__)

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "sampling_params",
)
"""Arguments of a call that say how to sample: the run's own settings count."""
PLAIN_CHOICES = (None, "auto")
"""Values of `tool_choice` that leave the choice to the model."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How requests with their own messages are answered, and whose doing an exception is."""

    match: MatchRule = "omitted"
    is_strict: bool = False
    """Whether requests are refused that ask for what can't be enforced."""
    takes_temperature: bool = False
    """Whether the temperature of a request counts."""
    mistakes: tuple[type[BaseException], ...] = ()
    """Exceptions of an agent that count as the model's doing: the episode ends with `mistake_reward`."""
    mistake_reward: float = 0.0


class SaidOnce:
    """Warnings of a run, each of which is logged when it first comes."""

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def warn(self, text: str) -> None:
        if text not in self._texts:
            self._texts.add(text)
            logger.warning("%s", text)


class ModelCalls:
    """Answers the calls of one episode's agent over its tree, on any thread. An answer counts as delivered
    when it is returned. `max_new_tokens` is the maximum of each response."""

    def __init__(
        self,
        tree: ConversationTree,
        settings: RequestSettings,
        max_new_tokens: int,
        notes: SaidOnce | None = None,
    ) -> None:
        self.run_loop = RunLoop()
        self.counts: Counter[str] = Counter()
        """Numbers of arguments that were `ignored`, and of those that were `unenforced`."""
        self._tree = tree
        self._settings = settings
        self._max_new_tokens = max_new_tokens
        self._notes = notes or SaidOnce()
        self._positions: dict[str, int] = {}
        self._budgets: dict[int, int] = {}
        """The maximum tokens that were asked for in each turn."""

    @property
    def turns(self) -> list[Turn]:
        """The responses so far."""
        return self._tree.turns

    async def answer(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> Answer:
        """The answer to all messages so far. `arguments` are those of the call: `stop`, `max_tokens`, and
        what `options` reads. Raises RequestError as `ConversationTree.answer` does."""
        return await self.run_loop.awaited(self._answer(messages, self.options(arguments), tools))

    def answer_blocking(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> Answer:
        """Like `answer`, for threads without an event loop. Raises BlockingFault on the run's own loop."""
        options = self.options(arguments)
        return self.run_loop.blocking(
            lambda: self._answer(messages, options, tools), "a synchronous call of the model", "use ainvoke"
        )

    def position(self, call_id: str | None) -> int:
        """The position, from 0, of a sampled call of a tool among the calls of its response; 0 for a call
        that wasn't sampled."""
        return self._positions.get(call_id or "", 0)

    def options(self, arguments: Mapping[str, Any]) -> CallOptions:
        """The options of a call. How to sample is the run's to say: other arguments are ignored, which is
        logged once and counted, and so is what can't be enforced. Raises RequestError for the latter if the
        settings are strict."""
        settings = self._settings
        temperature = arguments.get("temperature") if settings.takes_temperature else None
        ignored = [name for name in SAMPLING if arguments.get(name) is not None]
        if temperature is not None:
            ignored.remove("temperature")
        for name in ignored:
            self.counts["ignored"] += 1
            self._notes.warn(
                f"an agent calls the model with its own {name}: the run's sampling counts (actor_infer."
                "generating_args); gateway.client_temperature takes the temperature of calls"
            )
        for name in unenforced(arguments):
            self.counts["unenforced"] += 1
            sentence = (
                f"an agent calls the model with {name}, which can't be enforced while the policy samples"
            )
            if settings.is_strict:
                raise RequestError(f"{sentence}: leave it out, or unset gateway.strict")
            self._notes.warn(f"{sentence}: the model may answer otherwise; gateway.strict refuses such calls")
        stop = arguments.get("stop")
        if isinstance(stop, str):
            stop = [stop]
        max_tokens = arguments.get("max_tokens") or self._max_new_tokens
        return CallOptions(
            max_new_tokens=min(int(max_tokens), self._max_new_tokens),
            temperature=temperature,
            stop=tuple(stop) if stop else None,
        )

    def cut_by(self, answer_turn: int | None) -> Limit | None:
        """The limit that cut the response of a turn: `sequence_length` if its budget was what the context had
        room for, else `max_new_tokens`. None if it wasn't cut."""
        if answer_turn is None or self._tree.turns[answer_turn].finish_reason != "length":
            return None
        sampling = self._tree.turns[answer_turn].sampling
        asked = self._budgets.get(answer_turn, self._max_new_tokens)
        is_full = sampling is not None and sampling.max_new_tokens < asked
        return "sequence_length" if is_full else "max_new_tokens"

    async def _answer(
        self, messages: Sequence[Message], options: CallOptions, tools: Sequence[Mapping[str, Any]]
    ) -> Answer:
        answer = await self._tree.answer(messages, options, tools)
        self._tree.deliver(answer)
        self._budgets[answer.node] = options.max_new_tokens or self._max_new_tokens
        calls = answer.message.get("tool_calls") or ()
        errors = answer.message.get("call_errors") or ()
        for position, call in enumerate(calls):
            self._positions[call["id"]] = position
        answer.turn.metrics["tool_calls"] = float(len(calls) + len(errors))
        answer.turn.metrics["unreadable_calls"] = float(len(errors))
        return answer


def unenforced(arguments: Mapping[str, Any]) -> list[str]:
    """What a call asks for that sampling can't keep to.

    >>> unenforced({"tool_choice": "any", "parallel_tool_calls": True})
    ["tool_choice 'any'"]
    """
    asked = []
    choice = arguments.get("tool_choice")
    if choice not in PLAIN_CHOICES:
        asked.append(f"tool_choice {choice!r:.60}")
    if arguments.get("response_format") is not None:
        asked.append("a response_format")
    if arguments.get("parallel_tool_calls") is False:
        asked.append("parallel_tool_calls False")
    return asked
