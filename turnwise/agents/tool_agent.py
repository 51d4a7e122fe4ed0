"""The agent for rows of a data set with tools: generate, execute calls, show results, until a response has no
calls."""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.agents.single_turn_agent import RowAgentSettings, cut_by
from turnwise.data.prompts import prompt_of
from turnwise.errors import counted
from turnwise.protocols import Conversation, HearsCalls, OpenConversation
from turnwise.tools.interactions import Interactions, InteractionSession
from turnwise.tools.tool_box import ToolBox, ToolResult, ToolSession, readable
from turnwise.types import CallOptions, Limit, Message, SamplingParams, Status, Task, Trajectory

logger = logging.getLogger(__name__)

Side = Literal["left", "middle", "right"]
_MARK = "(truncated)"


@dataclass(frozen=True, slots=True)
class ToolAgentLimits:
    """Limits of an episode with tools."""

    max_parallel_calls: int = 1
    """Maximum calls of one response that are executed, all at once. The model is told that further calls were
    not executed."""
    max_tool_response_length: int = 1024
    """Maximum characters of a result that are shown to the model."""
    tool_response_truncate_side: Side = "middle"
    """Where characters of a longer result are removed."""


class ToolAgent:
    """Plays a row in one context. The row's tools are created once, and released however the episode ends. If
    the row names a simulated user, that user may reply to each response without calls. A call that can't be
    read or executed is answered with the reason. A tool that hangs or crashes ends the episode with an
    exception; the scheduler plays the row again."""

    def __init__(
        self,
        settings: RowAgentSettings,
        *,
        tools: ToolBox,
        limits: ToolAgentLimits,
        interactions: Interactions | None = None,
    ) -> None:
        self._settings = settings
        self._interactions = interactions or Interactions()
        self._tools = tools
        self._limits = limits

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """One trajectory: finished by a response without calls or by the simulated user, or truncated by a
        limit."""
        users = self._interactions
        async with (
            self._tools.open(task) as session,
            users.open(task, sibling, self._settings.max_user_turns, open_conversation) as user,
        ):
            # Special tokens in results of tools or messages of users would forge a turn.
            conversation = open_conversation(sampling, tools=session.schemas, encode_special_tokens=False)
            prompt = prompt_of(task.payload, self._settings.prompt_key, session.schemas)
            told = ToldSession(session, open_conversation)
            limit = await self._converse(told, user, conversation, prompt)
            rewards = await session.rewards()
            user_metrics = await user.metrics()
        status: Status = "truncated" if limit else "finished"
        trajectory = Trajectory(task, sibling, conversation.turns, status=status, limit=limit)
        trajectory.outcome_rewards = {f"tool/{name}": reward for name, reward in rewards.items()}
        for name in ("tool_calls", "unreadable_calls"):
            trajectory.metrics[name] = sum(turn.metrics[name] for turn in conversation.turns)
        trajectory.metrics |= session.metrics
        trajectory.metrics |= user_metrics
        return [trajectory]

    async def _converse(
        self,
        session: "ToldSession",
        user: InteractionSession,
        conversation: Conversation,
        messages: Sequence[Message],
    ) -> Limit | None:
        settings = self._settings
        transcript: list[Message] = []
        while True:
            reply = await conversation.generate(messages, CallOptions(settings.max_new_tokens))
            if reply is None:  # the last results, or the user's last message, leave no room for a response
                return "sequence_length"
            turn = conversation.turns[-1]
            recorded = reply.pop("tool_results", None)
            calls = reply.get("tool_calls") or ()
            errors = reply.get("call_errors") or ()
            turn.metrics = {
                "tool_calls": float(len(calls) + len(errors)),
                "unreadable_calls": float(len(errors)),
            }
            if turn.finish_reason == "length":
                return cut_by(conversation)
            transcript += [*messages, reply]
            started = time.perf_counter()
            if not calls and not errors:
                messages = await user.reply(transcript, turn)
                if not messages:
                    return user.limit
            if len(conversation.turns) == settings.max_assistant_turns:
                return "max_steps"
            if calls or errors:
                messages = await self._answers(session, calls, errors, recorded)
                turn.tool_results = tuple(message["content"] for message in messages)
            turn.step_s = time.perf_counter() - started

    async def _answers(
        self,
        session: "ToldSession",
        calls: Sequence[Mapping[str, Any]],
        errors: Sequence[str],
        recorded: Sequence[str] | None,
    ) -> list[Message]:
        """A message of role `tool` per call, in the order of the calls; unreadable calls come last.
        `recorded` are the texts of these messages in a replay; if there is one for each call, they are used
        and no call is executed."""
        errors = [readable(error) for error in errors]
        for error in errors:
            logger.info("Failed to decode tool call: %s", error)
        functions = [call["function"] for call in calls]
        if recorded is None or len(recorded) != len(calls) + len(errors):
            length = self._limits.max_tool_response_length
            side = self._limits.tool_response_truncate_side
            texts = [*await self._results(session, functions), *errors]
            recorded = [shortened(readable(text), length, side) for text in texts]
        # The model may write special tokens into an unknown name. In the template they would forge a turn.
        tool_names = {schema["function"]["name"] for schema in session.schemas}
        names = [f["name"] if f["name"] in tool_names else "error" for f in functions]
        names += ["error"] * len(errors)
        ids = [call["id"] for call in calls]
        ids += [f"error{number:04d}" for number in range(len(errors))]
        return [
            {"role": "tool", "name": name, "tool_call_id": call_id, "content": text}
            for name, call_id, text in zip(names, ids, recorded, strict=True)
        ]

    async def _results(self, session: "ToldSession", functions: Sequence[Mapping[str, Any]]) -> list[str]:
        max_calls = self._limits.max_parallel_calls
        running = []
        for function in functions[:max_calls]:
            name = function["name"]
            call = session.call(name, function["arguments"])
            running.append(asyncio.create_task(call, name=f"tool call {name!r:.60}"))
        try:
            results = await asyncio.gather(*running)
        finally:
            # If one call raises, the others must not outlive the episode.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        texts = [result.text for result in results]
        return texts + [not_executed(max_calls)] * (len(functions) - len(results))


@dataclass(frozen=True, slots=True)
class ToldSession:
    """The tools of an episode, whose answers are told to those who observe it."""

    session: ToolSession
    contexts: OpenConversation

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return self.session.schemas

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        started = time.perf_counter()
        result: ToolResult | None = None
        try:
            result = await self.session.call(name, arguments)
            return result
        finally:
            told = result or _fault_as_result()
            if isinstance(self.contexts, HearsCalls):
                self.contexts.called(
                    name,
                    arguments,
                    told.text,
                    time.perf_counter() - started,
                    is_error=told.is_error,
                    waited_s=told.waited_s,
                )


def _fault_as_result() -> ToolResult:
    """The exception that is being handled, as the answer to a call."""
    fault = sys.exception()
    return ToolResult(f"{type(fault).__name__}: {fault}", is_error=True)


def not_executed(max_calls: int) -> str:
    """What the model is told of a call beyond the maximum of a response."""
    return f"not executed: at most {counted(max_calls, 'call')} a turn"


def shortened(text: str, limit: int, side: Side) -> str:
    """At most `limit` characters of the text, with a mark where some were removed.

    >>> shortened("abcdefgh", 4, "middle"), shortened("abcdefgh", 4, "left"), shortened("abcd", 4, "right")
    ('ab...(truncated)...gh', '(truncated)...efgh', 'abcd')
    """
    if len(text) <= limit:
        return text
    match side:
        case "left":
            return f"{_MARK}...{text[-limit:]}"
        case "right":
            return f"{text[:limit]}...{_MARK}"
        case "middle":
            return f"{text[: limit // 2]}...{_MARK}...{text[-(limit - limit // 2) :]}"
