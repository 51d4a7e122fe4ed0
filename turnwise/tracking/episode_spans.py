"""Makes the spans of one episode from what its observer hears."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.protocols import SilentObserver, TurnPlace
from turnwise.tracking.spans import Span, json_of
from turnwise.types import Message, Task, Trajectory, Turn

_SHORTEST_NS = 1_000_000
"""A wait for a server and the work of an agent between two requests are spans if they take this long."""

OnEnd = Callable[["EpisodeSpans"], None]


class EpisodeSpans(SilentObserver):
    """Hears one attempt at an episode, and keeps a span of each thing that took time. `on_end` is called when
    the attempt is over."""

    def __init__(self, task: Task, sibling: int, on_end: OnEnd) -> None:
        self.task = task
        self.sibling = sibling
        self.trajectories: Sequence[Trajectory] = ()
        self.status = "running"
        agent = task.agent or task.tag
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": f"{task.id}/{sibling}",
        }
        now = time.time_ns()
        self.spans = [Span(f"invoke_agent {agent}", "episode", now, now, None, attributes)]
        self._on_end = on_end
        self._asked: dict[int, int] = {}
        """Context → the time of a request that isn't answered yet."""
        self._generated: dict[int, int] = {}
        """Number of a turn → index of its span."""
        self._newest: dict[int, int] = {}
        """Context → the number of its newest turn."""
        self._lengths: dict[int, int] = {}
        """Number of a turn → tokens of its context, up to its end."""
        self._num_heard: dict[int, int] = {}
        """Number of a turn → how many calls of tools and users had been heard at its end."""
        self._num_calls = 0
        self._open_calls: list[tuple[int, str, Any]] = []
        """The calls of responses that no tool has answered yet: number of the turn, name, arguments."""
        self._steps: list[Span] = []
        self._unanswered: int | None = None
        """The newest turn, until the environment has answered it."""

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None:
        self._asked[place.context] = time.time_ns()

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        now = time.time_ns()
        generate_ns = int(turn.generate_s * 1e9)
        asked = self._asked.pop(place.context, now)
        served = now - generate_ns
        # A tree tells a request when it is answered.
        start = min(asked, served)
        before = self._turn_before(place, turn)
        reused = 0
        if before is not None and not turn.starts_context:
            reused = self._lengths.get(before, 0)
            self._add_agent(before, start)
        num_prompt = len(turn.prompt_ids)
        num_sampled = len(turn.response_ids)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": reused + num_prompt,
            "gen_ai.usage.output_tokens": num_sampled,
            "gen_ai.response.finish_reasons": [turn.finish_reason],
            "turnwise.turn": place.number,
            "turnwise.parent_turn": before,
            "turnwise.context": place.context,
            "turnwise.reused_tokens": reused,
            "turnwise.new_tokens": num_prompt,
        }
        if turn.generate_s > 0:
            attributes["turnwise.tokens_per_s"] = round(num_sampled / turn.generate_s, 1)
        index = len(self.spans)
        self.spans.append(Span("chat", "generate", start, now, 0, attributes, turn=turn))
        if generate_ns and served - start >= _SHORTEST_NS:
            self.spans.append(Span("server_wait", "server_wait", start, served, index))
        number = place.number
        self._generated[number] = index
        self._newest[place.context] = number
        self._lengths[number] = reused + num_prompt + num_sampled
        self._num_heard[number] = self._num_calls
        self._unanswered = number
        for call in reply.get("tool_calls") or ():
            function = call["function"]
            self._open_calls.append((number, function["name"], json_of(function.get("arguments"))))

    def called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        result: str,
        seconds: float,
        *,
        is_error: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        shown_arguments = json_of(arguments)
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.arguments": shown_arguments,
            "gen_ai.tool.call.result": result,
            "turnwise.waited_s": round(waited_s, 6),
        }
        error = result if is_error else ""
        turn = self._turn_of_call(name, shown_arguments)
        self._add_call(f"execute_tool {name}", "tool", seconds, attributes, error, turn)

    def replied(self, text: str, seconds: float) -> None:
        self._add_call("user", "user", seconds, {"turnwise.user_text": text}, "", self._unanswered)

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        index = self._generated.get(place.number)
        is_step = self.task.row is None and turn.step_s > 0
        if index is None or not is_step:
            return
        # The agent steps the environment as soon as it has the response.
        start = self.spans[index].end_ns
        attributes = {
            "turnwise.turn": place.number,
            "turnwise.action": turn.action,
            "turnwise.reward": turn.reward,
            "turnwise.ended": False,
        }
        step = Span("step", "env_step", start, start + int(turn.step_s * 1e9), 0, attributes)
        self.spans.append(step)
        self._steps.append(step)
        self._num_calls += 1
        if self._unanswered == place.number:
            self._unanswered = None

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None:
        now = time.time_ns()
        self.trajectories = list(trajectories)
        episode = self.spans[0]
        episode.end_ns = now
        if fault is None:
            self._note_outcome()
        else:
            self.status = "cancelled" if isinstance(fault, asyncio.CancelledError) else "failed"
            episode.error = error_text(fault)
            if not self._asked and self.task.row is None and self._unanswered is not None:
                start = self.spans[self._generated[self._unanswered]].end_ns
                turn = {"turnwise.turn": self._unanswered}
                self.spans.append(Span("step", "env_step", start, now, 0, turn, episode.error))
        for context, asked in self._asked.items():
            attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "turnwise.context": context}
            if fault is None:
                attributes["gen_ai.response.finish_reasons"] = ["no_room"]
            self.spans.append(Span("chat", "generate", asked, now, 0, attributes, episode.error))
        self._asked.clear()
        self._on_end(self)

    def _note_outcome(self) -> None:
        if not self.trajectories:
            self.status = "failed"
            return
        trajectory = self.trajectories[0]
        self.status = trajectory.status
        if trajectory.error:
            self.spans[0].error = trajectory.error
        if trajectory.limit:
            self.spans[0].attributes["turnwise.limit"] = trajectory.limit
        if self._steps and trajectory.limit in (None, "environment"):
            self._steps[-1].attributes["turnwise.ended"] = True

    def _turn_before(self, place: TurnPlace, turn: Turn) -> int | None:
        if turn.parent is not None:
            return turn.parent
        if turn.starts_context:
            return None
        return self._newest.get(place.context)

    def _add_agent(self, before: int, start: int) -> None:
        """Adds a span for what an agent did between its last response and a request, if nothing else is known
        of that time."""
        index = self._generated.get(before)
        if index is None or self._num_heard[before] != self._num_calls:
            return
        end = self.spans[index].end_ns
        if start - end >= _SHORTEST_NS:
            self.spans.append(Span("agent", "agent", end, start, 0, {"turnwise.turn": before}))

    def _turn_of_call(self, name: str, arguments: Any) -> int | None:
        """The number of the turn that made a call. Branches play at the same time, so it needn't be the
        newest turn: it is the last that has made this call and has no answer to it. A call beyond
        `max_parallel_calls` never gets one."""
        for entry in reversed(self._open_calls):
            if entry[1:] == (name, arguments):
                self._open_calls.remove(entry)
                return entry[0]
        return self._unanswered

    def _add_call(
        self,
        name: str,
        kind: Any,
        seconds: float,
        attributes: dict[str, Any],
        error: str,
        turn: int | None,
    ) -> None:
        now = time.time_ns()
        if turn is not None:
            attributes["turnwise.turn"] = turn
        self.spans.append(Span(name, kind, now - int(seconds * 1e9), now, 0, attributes, error))
        self._num_calls += 1


def error_text(fault: BaseException) -> str:
    """The kind and message of an exception, in one line."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text}".rstrip(": ")
