"""The simulated user of one conversation: its state, its replies with deadlines, and who is to blame when one goes wrong."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from turnwise.errors import EnvironmentFault, TurnwiseError, nearest
from turnwise.protocols import Interaction
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.tools.session import TRACK, ToolFault, finite, readable
from turnwise.types import Limit, Message, Task, Turn

logger = logging.getLogger(__name__)

_ANSWER = "an interaction answers (should_terminate, text, score, metadata)"


def interaction_kwargs(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `extra_info.interaction_kwargs`, without what is null, as tables write what a row lacks."""
    extra = columns.get("extra_info")
    kwargs = extra.get("interaction_kwargs") if isinstance(extra, Mapping) else None
    return {key: value for key, value in kwargs.items() if value is not None} if isinstance(kwargs, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Interactions:
    """The simulated users that rows may name."""

    by_name: Mapping[str, Interaction] = field(default_factory=dict)
    timeout_s: float | None = None
    """Seconds of one call."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def open(self, task: Task, sibling: int, max_turns: int | None = None) -> InteractionSession:
        """The user that the row names, with at most `max_turns` messages; nobody if it names none.

        Raises:
            ToolFault: there is no such user.
        """
        kwargs = interaction_kwargs(task.payload)
        name = str(kwargs.get("name", ""))
        if name and name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ToolFault(f"{task.id}: there is no interaction {name!r}, but {known}.{nearest(name, self.by_name)}")
        return InteractionSession(self, name, kwargs, task, sibling, max_turns)


class InteractionSession:
    """The simulated user of one conversation, or nobody. Entering it makes the state, and leaving it releases it, however it is
    left."""

    limit: Limit | None = None
    """Why the user says no more, unless it ended the conversation."""
    num_turns = 0
    """Messages that the user has said."""

    def __init__(
        self, box: Interactions, name: str, kwargs: Mapping[str, Any], task: Task, sibling: int, max_turns: int | None
    ) -> None:
        self._box, self._name, self._kwargs = box, name, kwargs
        self._task, self._id, self._max_turns = task, f"{task.id}/{sibling}", max_turns
        self._state: Any = None

    @property
    def is_there(self) -> bool:
        return bool(self._name)

    async def __aenter__(self) -> Self:
        if self.is_there:
            state = await self._ask("start_interaction", self._id, **self._kwargs)
            self._state = self._id if state is None else state
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
            # The episode ends with what went wrong first.
            logger.warning("%s: %s", self._id, later)

    async def reply(self, messages: Sequence[Message], turn: Turn) -> list[Message]:
        """The user's next message, after the conversation up to the answer of `turn`, which gets its score as a reward. Empty
        if the user ends the conversation, isn't there, or has said as much as it may, which is the `limit`.

        Raises:
            ToolFault: the user took too long, or answered in another form.
            EnvironmentFault: the user raised something.
        """
        if not self.is_there:
            return []
        said = await self._ask("generate_response", self._state, list(messages), **self._kwargs)
        what = f"the interaction {self._name}"
        if not isinstance(said, tuple | list) or len(said) != 4:
            raise ToolFault(f"{what} answered {said!r:.80}; {_ANSWER}")
        is_over, text, score, metadata = said
        if not isinstance(text, str):
            raise ToolFault(f"{what} answered a {type(text).__name__} as its text; {_ANSWER}")
        turn.reward += 0.0 if score is None else finite(score, f"{what}.generate_response (score)")
        numbers = metadata.items() if isinstance(metadata, Mapping) else ()
        turn.metrics |= {
            f"interaction/{key}": float(v) for key, v in numbers if isinstance(v, int | float) and math.isfinite(v)
        }
        if is_over:
            return []
        if self.num_turns == self._max_turns:
            self.limit = "max_steps"
            return []
        self.num_turns += 1
        return [{"role": "user", "content": readable(text)}]

    async def metrics(self) -> dict[str, float]:
        """How much the user said, and the score of the whole conversation."""
        if not self.is_there:
            return {}
        score = finite(await self._ask("calculate_score", self._state), f"the interaction {self._name}.calculate_score")
        return {"user_turns": float(self.num_turns), f"interaction/{self._name}/score": score}

    async def _ask(self, method: str, *arguments: Any, **kwargs: Any) -> Any:
        box, what = self._box, f"the interaction {self._name}.{method}"
        waiter = f"an episode of {self._task.tag}"
        limit = box.watchdog.waiting(waiter, what, box.timeout_s, "agent.tool_timeout_s", ToolFault)
        started = box.stopwatch.now()
        try:
            with Foreign(what, self._task.id, are_faults=True):
                async with limit:
                    try:
                        result = getattr(box.by_name[self._name], method)(*arguments, **kwargs)
                        return await result if inspect.isawaitable(result) else result
                    except TurnwiseError as fault:
                        raise ToolFault(f"{what}: {fault}") from fault
        finally:
            box.stopwatch.add(TRACK, self._name, started)
