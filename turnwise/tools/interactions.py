"""The simulated user of one episode: its state, and calls with deadlines."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from turnwise.errors import EnvironmentFault, TurnwiseError, nearest
from turnwise.protocols import HearsUsers, Interaction
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.tools.tool_box import TRACK, ToolFault, finite, is_finite, readable
from turnwise.types import Limit, Message, Task, Turn

logger = logging.getLogger(__name__)

_ANSWER = "an interaction answers (should_terminate, text, score, metadata)"


def interaction_kwargs(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `extra_info.interaction_kwargs` without nulls, which tables hold for missing values; {} if
    the row has none."""
    extra = columns.get("extra_info")
    kwargs = extra.get("interaction_kwargs") if isinstance(extra, Mapping) else None
    if not isinstance(kwargs, Mapping):
        return {}
    return {key: value for key, value in kwargs.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Interactions:
    """The simulated users that rows may name."""

    by_name: Mapping[str, Interaction] = field(default_factory=dict)
    timeout_s: float | None = None
    """Maximum seconds of one call; None = no limit."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def watched(self, watchdog: Watchdog, stopwatch: Stopwatch) -> "Interactions":
        """The same users, whose calls are watched and timed by these."""
        return replace(self, watchdog=watchdog, stopwatch=stopwatch)

    def open(
        self,
        task: Task,
        sibling: int,
        max_turns: int | None = None,
        contexts: object = None,
    ) -> "InteractionSession":
        """A session with the simulated user that the task's row names, or with nobody if it names none. The
        user sends at most `max_turns` messages (None = any number). If `contexts` hear users (`HearsUsers`),
        they are told each answer. Raises ToolFault if the name is unknown."""
        kwargs = interaction_kwargs(task.payload)
        name = str(kwargs.get("name", ""))
        if name and name not in self.by_name:
            names = ", ".join(self.by_name) or "none"
            raise ToolFault(
                f"{task.id}: there is no interaction {name!r}; known are "
                f"{names}.{nearest(name, self.by_name)}"
            )
        return InteractionSession(self, name, kwargs, task, sibling, max_turns, contexts)


class InteractionSession:
    """The simulated user of one conversation, if any (`is_there`). Entering makes the user's state, and
    leaving releases it."""

    limit: Limit | None = None
    """`max_steps` if the user wanted to go on and had sent `max_turns` messages, else None."""
    num_turns = 0
    """Number of messages that the user has sent."""

    def __init__(
        self,
        box: Interactions,
        name: str,
        kwargs: Mapping[str, Any],
        task: Task,
        sibling: int,
        max_turns: int | None,
        contexts: object = None,
    ) -> None:
        self._box = box
        self._name = name
        self._label = f"the interaction {name}"
        self._kwargs = kwargs
        self._task = task
        self._id = f"{task.id}/{sibling}"
        self._max_turns = max_turns
        self._contexts = contexts
        self._state: Any = None

    @property
    def is_there(self) -> bool:
        return bool(self._name)

    async def __aenter__(self) -> Self:
        if self.is_there:
            self._state = await self._ask("start_interaction", self._id, **self._kwargs)
            if self._state is None:
                self._state = self._id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_there:
            return
        try:
            await self._ask("finalize_interaction", self._state)
        except EnvironmentFault as later:
            if fault is None:
                raise
            # The episode ends with the first error.
            logger.warning("%s: %s", self._id, later)

    async def reply(self, messages: Sequence[Message], turn: Turn) -> list[Message]:
        """The user's next message after the model's answer in `turn`, as a list. The list is empty if there
        is no user, if the user ends the conversation, or if the user had already sent `max_turns` messages
        (this sets `limit`). Adds the user's score to the turn's reward, and the numbers in the user's
        metadata to the turn's metrics. Raises ToolFault if the user takes too long or answers in a wrong
        form; EnvironmentFault if the user raises an exception."""
        started = self._box.stopwatch.now()
        answers = await self._reply(messages, turn)
        if self.is_there and isinstance(self._contexts, HearsUsers):
            text = "".join(answer["content"] for answer in answers)
            self._contexts.replied(text, self._box.stopwatch.now() - started)
        return answers

    async def _reply(self, messages: Sequence[Message], turn: Turn) -> list[Message]:
        if not self.is_there:
            return []
        answer = await self._ask("generate_response", self._state, list(messages), **self._kwargs)
        if not isinstance(answer, tuple | list) or len(answer) != 4:
            raise ToolFault(f"{self._label} answered {answer!r:.80}; {_ANSWER}")
        is_over, text, score, metadata = answer
        if not isinstance(text, str):
            raise ToolFault(f"{self._label} answered a {type(text).__name__} as its text; {_ANSWER}")
        if score is not None:
            turn.reward += finite(score, f"{self._label}.generate_response (score)")
        if isinstance(metadata, Mapping):
            numbers = {key: value for key, value in metadata.items() if is_finite(value)}
            turn.metrics |= {f"interaction/{key}": float(value) for key, value in numbers.items()}
        if is_over:
            return []
        if self.num_turns == self._max_turns:
            self.limit = "max_steps"
            return []
        self.num_turns += 1
        return [{"role": "user", "content": readable(text)}]

    async def metrics(self) -> dict[str, float]:
        """The number of the user's messages and the score of the whole conversation; {} if there is no
        user."""
        if not self.is_there:
            return {}
        number = await self._ask("calculate_score", self._state)
        score = finite(number, f"{self._label}.calculate_score")
        return {"user_turns": float(self.num_turns), f"interaction/{self._name}/score": score}

    async def _ask(self, method: str, /, *arguments: Any, **kwargs: Any) -> Any:
        box = self._box
        call = f"{self._label}.{method}"
        waiter = f"an episode of {self._task.tag}"
        limit = box.watchdog.waiting(
            waiter,
            call,
            box.timeout_s,
            "agent.tool_timeout_s",
            ToolFault,
        )
        started = box.stopwatch.now()
        try:
            with Foreign(call, self._task.id, are_faults=True):
                async with limit:
                    try:
                        result = getattr(box.by_name[self._name], method)(*arguments, **kwargs)
                        if inspect.isawaitable(result):
                            result = await result
                        return result
                    except TurnwiseError as fault:
                        raise ToolFault(f"{call}: {fault}") from fault
        finally:
            box.stopwatch.add(TRACK, self._name, started)
