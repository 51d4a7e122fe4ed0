"""The contracts of what is played: environments, conversations, agents, observers of an episode, and
rewards."""

import asyncio
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from turnwise.types import (
    AS_OPENED,
    CallOptions,
    Group,
    Message,
    Observation,
    Reduction,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
)

MakeEnv = Callable[[Task], "Env"]


class Env(Protocol):
    """Gymnasium's contract with text actions, and with observations of text or of text and images.
    Environments see no tokens. `reset` and `step` may be coroutines. `step`'s info may have `"metrics"`, a
    dict of numbers named in `metric_reductions`."""

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Each metric of the environment, and how the values of an episode's steps combine into one."""

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]: ...

    def step(self, action: str) -> tuple[str | Observation, float, bool, bool, dict[str, Any]]:
        """`(observation, reward, terminated, truncated, info)` after one action; "" stands for an unparsed
        action."""

    def render(self) -> Any:
        """What people see: an RGB array [H, W, 3], a string, or None."""

    def close(self) -> None: ...


@runtime_checkable
class HasStateKey(Protocol):
    """An environment with a key of its true state, because equal observations may hide different states
    (GiGPO)."""

    def state_key(self) -> Hashable: ...


@runtime_checkable
class WaitsForPlace(Protocol):
    """An environment whose server plays a limited number of episodes at once."""

    async def wait_for_place(self) -> None:
        """Waits until there is a place for this episode. Called once, before `reset`; an environment that
        raises here is closed already."""


@runtime_checkable
class HasExpert(Protocol):
    """An environment that can name good actions, for a baseline and for demonstrations."""

    def expert_action(self) -> str:
        """A good action in the current state."""


@runtime_checkable
class HasRandomAction(Protocol):
    """An environment whose actions are free text, and that can draw one for a random player."""

    def random_action(self, rng: random.Random) -> str:
        """An action that is valid in the current state."""


class RemoteEnv(Env, Protocol):
    """An environment in a worker process. `reset`, `step` and `close` may be coroutines."""

    class_name: str
    has_state_key: bool
    """Whether the environment has a method `state_key`."""
    last_state_key: Hashable
    """The key of the state before the last step; None if the environment has none."""


class Conversation(Protocol):
    """A conversation with the model in one context, as agents see it. `chat.conversation` keeps its exact
    tokens."""

    turns: list[Turn]
    """One turn per response, in order. The agent writes action, reward, state key and metrics into each
    turn."""

    async def generate(
        self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED
    ) -> Message | None:
        """Adds the messages, samples a response and returns it as an assistant message. Options may differ
        from call to call.

        Returns None, and samples nothing, if the context has no room for the messages and one token. In a
        context with tools the message has `tool_calls`, in OpenAI's form with arguments as a mapping, and
        `call_errors`, a sentence for each call that can't be read. Its `content` is the text around the
        calls, without the thinking, which is in `reasoning_content`; the turn's `text` is the whole response.
        In a replay it may have `tool_results`, the recorded answers to the calls. Raises ServerError if the
        request can't be served; RolloutError if the episode's first prompt doesn't fit into its context."""

    async def close(self) -> None:
        """Ends the context: servers may forget it. Closing again changes nothing."""

    def remaining_tokens(self) -> int:
        """The number of tokens that the context still has room for."""


class OpenConversation(Protocol):
    """Opens a context. Agents call it once per episode in trajectory mode, once per turn in step mode, and
    once per sub-agent. `parent` is the index of the turn that an agent's rewritten history branches off; the
    context's first Turn records it. `tools` are the schemas that the prompt shows. Without
    `encode_special_tokens`, special tokens that are spelt out in messages of users and tools stay ordinary
    text."""

    def __call__(
        self,
        sampling: SamplingParams,
        *,
        parent: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        encode_special_tokens: bool = True,
    ) -> Conversation: ...


@runtime_checkable
class AgentLoop(Protocol):
    """Plays one task. Returns one trajectory, or several (sub-agents, compaction) whose weights add up to 1.
    Failures of an environment or a tool are raised; the scheduler records them, retries, and continues."""

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]: ...


@runtime_checkable
class PlaysInPlaces(Protocol):
    """An agent that plays a limited number of episodes at once. The wait for a place is no part of the
    episode: it counts for no time limit."""

    places: asyncio.Semaphore | None


class TurnPlace(NamedTuple):
    """Where a turn stands in its episode."""

    number: int
    """Counts the responses of the episode from 0."""
    context: int
    """Counts the contexts that the agent has opened from 0."""


class EpisodeObserver(Protocol):
    """Hears one episode as it happens, and changes nothing. `docs/design/ledger.md` says who tells which
    event."""

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None:
        """The agent asks for the response to new messages."""

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        """The response was sampled. The agent changes the turn later."""

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
        """A tool has answered a call, or failed: then `result` is the error. `seconds` is all that the call
        took, `waited_s` of them for a place among concurrent calls."""

    def replied(self, text: str, seconds: float) -> None:
        """The simulated user has answered; empty if it ended the conversation."""

    def reset(self, env: Env, result: tuple[Any, ...]) -> None:
        """`env.reset` has returned. This event and `stepped` come in the thread that calls the
        environment."""

    def stepped(self, env: Env, action: str, result: tuple[Any, ...]) -> None:
        """`env.step` has returned."""

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        """The agent has written action, reward and metrics into the turn. Told before the next turn, and at
        the end."""

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None:
        """The episode is over. `fault` is the exception that ended it, if any."""


class SilentObserver:
    """An EpisodeObserver that ignores every event; a base class for those that hear some."""

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None: ...

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None: ...

    def called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        result: str,
        seconds: float,
        *,
        is_error: bool = False,
        waited_s: float = 0.0,
    ) -> None: ...

    def replied(self, text: str, seconds: float) -> None: ...

    def reset(self, env: Env, result: tuple[Any, ...]) -> None: ...

    def stepped(self, env: Env, action: str, result: tuple[Any, ...]) -> None: ...

    def rewarded(self, place: TurnPlace, turn: Turn) -> None: ...

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None: ...


@runtime_checkable
class HearsCalls(Protocol):
    """An OpenConversation of an observed episode: the agent tells it the calls of tools, as
    `EpisodeObserver.called` hears them."""

    def called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        result: str,
        seconds: float,
        *,
        is_error: bool = False,
        waited_s: float = 0.0,
    ) -> None: ...


@runtime_checkable
class HearsUsers(Protocol):
    """An OpenConversation of an observed episode: the agent tells it what a simulated user answered."""

    def replied(self, text: str, seconds: float) -> None: ...


class RewardResult(NamedTuple):
    """One score per episode of a group, in order: failed episodes are left out, the greedy one is last."""

    scores: Sequence[float | None]
    """None where the reward doesn't apply: it adds nothing to that episode."""
    turn_rewards: Sequence[Sequence[float]] | None = None  # for each of these episodes, one reward per turn
    metrics: Sequence[Mapping[str, float]] | None = None
    """For each of these episodes, numbers by name that are recorded beside the score."""
    comments: Sequence[Mapping[str, str]] | None = None
    """For each of these episodes, texts by name that are recorded for readers, such as a judge's words."""


class Reward(Protocol):
    """Scores the episodes of a group as soon as all of them have ended."""

    async def __call__(self, group: Group) -> RewardResult: ...
