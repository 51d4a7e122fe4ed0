"""The contracts between packages. Any class with the right methods implements one; nothing here imports a heavy library.
`docs/design/protocols.md` shows how each contract fits the systems that it is for."""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from turnwise.runtime.placement import Placement
from turnwise.runtime.rank import RankContext
from turnwise.runtime_info import MemoryKind as MemoryKind, StrategyInfo
from turnwise.server_protocols import (
    InferenceServer as InferenceServer,
    PolicyServer as PolicyServer,
    ServerFactory as ServerFactory,
    Suspension as Suspension,
)
from turnwise.tool_protocols import (
    ChecksRows as ChecksRows,
    Interaction as Interaction,
    ParsedResponse as ParsedResponse,
    Tool as Tool,
    ToolCall as ToolCall,
    ToolCallParser as ToolCallParser,
)
from turnwise.transfer.contracts import (
    NamedTensors as NamedTensors,
    OnWeightUpdate as OnWeightUpdate,
    SendsWeights as SendsWeights,
    WeightSource as WeightSource,
    WeightTransfer as WeightTransfer,
)
from turnwise.types import (
    AS_OPENED,
    Batch,
    CallOptions,
    Denominators,
    Group,
    Message,
    Metric,
    ModelOutputs,
    Observation,
    Reduction,
    SamplingParams,
    Task,
    TokenAnnotations,
    Trajectory,
    Turn,
)

Output = Literal["logprobs", "full_logprobs", "entropy", "values", "next_values"]
"""For each token: its log-prob over its kept ids (those that top-k, top-p or min-p left) and over the whole vocabulary, the
entropy of its distribution, and the values of the states before and after it."""
Route = Literal["split", "broadcast", "rank0"]
MakeEnv = Callable[[Task], "Env"]


# Environments and agents


class Env(Protocol):
    """Gymnasium's contract with text actions, and with observations of text or of text and images. Environments see no tokens.
    `reset` and `step` may be coroutines. `step`'s info may have `"metrics"`, a dict of numbers named in `metric_reductions`."""

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Each metric of the environment, and how the values of an episode's steps combine into one."""

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]: ...

    def step(self, action: str) -> tuple[str | Observation, float, bool, bool, dict[str, Any]]:
        """`(observation, reward, terminated, truncated, info)` after one action; "" stands for an unparsed action."""

    def render(self) -> Any:
        """What people see: an RGB array [H, W, 3], a string, or None."""

    def close(self) -> None: ...


@runtime_checkable
class HasStateKey(Protocol):
    """An environment with a key of its true state, because equal observations may hide different states (GiGPO)."""

    def state_key(self) -> Hashable: ...


@runtime_checkable
class HasExpert(Protocol):
    """An environment that can name good actions, for a baseline and for demonstrations."""

    def expert_action(self) -> str:
        """A good action in the current state."""


class Conversation(Protocol):
    """A conversation with the model in one context, as agents see it. `chat.conversation` keeps its exact tokens."""

    turns: list[Turn]
    """One turn per response, in order. The agent writes action, reward, state key and metrics into each turn."""

    async def generate(self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED) -> Message | None:
        """Adds the messages, samples a response and returns it as an assistant message. Options may differ from call to call.

        Returns None, and samples nothing, if the context has no room for the messages and one token. In a context with tools
        the message has `tool_calls`, in OpenAI's form with arguments as a mapping, and `call_errors`, a sentence for each call
        that can't be read. In a replay it may have `tool_results`, the recorded answers to the calls. Raises ServerError if the
        request can't be served; RolloutError if the episode's first prompt doesn't fit into its context."""

    async def close(self) -> None:
        """Ends the context: servers may forget it. Closing again changes nothing."""

    def remaining_tokens(self) -> int:
        """The number of tokens that the context still has room for."""


class OpenConversation(Protocol):
    """Opens a context. Agents call it once per episode in trajectory mode, once per turn in step mode, and once per sub-agent.
    `parent` is the index of the turn that an agent's rewritten history branches off; the context's first Turn records it.
    `tools` are the schemas that the prompt shows. Without `encode_special_tokens`, special tokens that are spelt out in
    messages of users and tools stay ordinary text."""

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
    """Plays one task. Returns one trajectory, or several (sub-agents, compaction) whose weights add up to 1. Failures of
    an environment or a tool are raised; the scheduler records them, retries, and continues."""

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]: ...


class TurnPlace(NamedTuple):
    """Where a turn stands in its episode."""

    number: int
    """Counts the responses of the episode from 0."""
    context: int
    """Counts the contexts that the agent has opened from 0."""


class EpisodeObserver(Protocol):
    """Hears one episode as it happens, and changes nothing. `docs/design/ledger.md` says who tells which event."""

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None:
        """The agent asks for the response to new messages."""

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        """The response was sampled. The agent changes the turn later."""

    def called(self, name: str, arguments: Mapping[str, Any], result: str, seconds: float) -> None:
        """A tool has answered a call."""

    def reset(self, env: Env, result: tuple[Any, ...]) -> None:
        """`env.reset` has returned. This event and `stepped` come in the thread that calls the environment."""

    def stepped(self, env: Env, action: str, result: tuple[Any, ...]) -> None:
        """`env.step` has returned."""

    def rewarded(self, place: TurnPlace, turn: Turn) -> None:
        """The agent has written action, reward and metrics into the turn. Told before the next turn, and at the end."""

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None:
        """The episode is over. `fault` is the exception that ended it, if any."""


class SilentObserver:
    """An EpisodeObserver that ignores every event; a base class for those that hear some."""

    def asked(self, place: TurnPlace, messages: Sequence[Message]) -> None: ...

    def sampled(self, place: TurnPlace, turn: Turn, reply: Message) -> None: ...

    def called(self, name: str, arguments: Mapping[str, Any], result: str, seconds: float) -> None: ...

    def reset(self, env: Env, result: tuple[Any, ...]) -> None: ...

    def stepped(self, env: Env, action: str, result: tuple[Any, ...]) -> None: ...

    def rewarded(self, place: TurnPlace, turn: Turn) -> None: ...

    def ended(self, trajectories: Sequence[Trajectory], fault: BaseException | None) -> None: ...


@runtime_checkable
class HearsCalls(Protocol):
    """An OpenConversation of an observed episode: the agent tells it the calls of tools."""

    def called(self, name: str, arguments: Mapping[str, Any], result: str, seconds: float) -> None: ...


class RewardResult(NamedTuple):
    """One score per episode of a group, in order: failed episodes are left out, the greedy one is last."""

    scores: Sequence[float | None]
    """None where the reward doesn't apply: it adds nothing to that episode."""
    turn_rewards: Sequence[Sequence[float]] | None = None  # for each of these episodes, one reward per turn
    metrics: Sequence[Mapping[str, float]] | None = None
    """For each of these episodes, numbers by name that are recorded beside the score."""


class Reward(Protocol):
    """Scores the episodes of a group as soon as all of them have ended."""

    async def __call__(self, group: Group) -> RewardResult: ...


# Training


class Loss(Protocol):
    """The function that a strategy minimises. It returns a *sum already divided by the step's denominators*, so that losses and
    gradients of micro-batches and ranks add up."""

    outputs: frozenset[Output]
    """The outputs of the forward pass that the loss needs."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]: ...


class StepPart(NamedTuple):
    """Says which part of an optimiser step a call of `train_step` computes, if the step's samples come in parts."""

    number: int = 0
    """Counts from 0. Part 0 discards what an unfinished earlier step left behind."""
    divisor: float | None = 1.0
    """Divisor of the gradients summed over all parts, given with the last part. None = more parts come."""


WHOLE_STEP = StepPart()


class TrainStrategy(Protocol):
    """One role's model and optimiser on this rank. It doesn't know the algorithm."""

    def forward(
        self, batches: Sequence[Batch], outputs: frozenset[Output], without_adapter: bool = False
    ) -> list[dict[str, Any]]:
        """For each batch the `outputs` by name: numpy arrays [N], without gradients. No logits leave the strategy, since the
        vocabulary may be sharded. `without_adapter` turns the LoRA adapter off, so that the base model serves as reference."""

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, position: float = 0.0, part: StepPart = WHOLE_STEP
    ) -> list[Metric]:
        """Makes one optimiser step over the *list* of its micro-batches, since pipeline schedules and engines with their own
        accumulation and clipping need them together. If the step comes in parts, adds gradients up until the last `part`.
        `position` in the learning-rate schedule counts the optimiser steps planned before (docs/design/training.md)."""

    def weights(self) -> Iterator[tuple[str, Any]]:
        """`(Hugging Face name, tensor)` of every parameter, with adapters merged in and sharded parameters made whole."""

    def save(self, folder: Path) -> None:
        """Writes the whole state. If each rank holds the whole model, only the first rank is called, so that it can save after
        another rank has died. If the model is sharded, all ranks are called, and the first one writes."""

    def load(self, folder: Path) -> None: ...

    def offload(self, kinds: Iterable[MemoryKind]) -> None: ...

    def onload(self, kinds: Iterable[MemoryKind]) -> None: ...

    def info(self) -> StrategyInfo:
        """What the strategy really runs, which may differ from the config."""


class Stateful(Protocol):
    """A part of a run whose state is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """The state, made of values that JSON can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Algorithm(Protocol):
    """Credit assignment and loss of one method. A new method needs a file of its own and an entry in `spec`. A class that
    a config names as `module:Class` is called with `(settings, kl_controller)`."""

    needs: frozenset[str]
    """Which of `old_logprobs`, `ref_logprobs`, `values`, `greedy_sibling` the method needs."""
    loss: Loss
    """The policy's loss, a separate object, so that it can be sent to the ranks of a strategy."""
    value_loss: Loss | None
    """The critic's loss, None for a method without a critic."""
    running: Stateful | None
    """Statistics of the whole run (`running` normalisation), None if unused."""

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages`, and with a critic `returns`, into every Sample of the groups. Returns metrics."""


@runtime_checkable
class StreamsStep(Protocol):
    """A loss whose optimiser step may come in parts. The loss is a sum with one term per sample, divided by *one* denominator
    of the step. In a part's batches all denominators but `max_length` are 1, since those of the step aren't known yet.
    `NeedsWholeStep.prepare` is called for each part."""

    def divisor(self, denominators: Denominators) -> float:
        """The divisor of the summed gradients of the parts."""

    def whole(self, metrics: Sequence[Metric], denominators: Denominators) -> list[Metric]:
        """The metrics of the whole step, from those of its parts."""


@runtime_checkable
class NeedsAdvantages(Protocol):
    """A loss that tells whether an update in which all advantages are 0 would change anything."""

    @property
    def needs_advantages(self) -> bool:
        """Whether the gradient is 0 if all advantages are 0. If True, an update whose advantages are all 0 is skipped."""


@runtime_checkable
class NeedsWholeStep(Protocol):
    """A loss that chooses, masks or weights single tokens by looking at the whole optimiser step."""

    def prepare(self, step_batch: Batch, seed: int) -> tuple[TokenAnnotations, list[Metric]]:
        """Returns annotations of the tokens of the next optimiser step, numpy arrays [N], and metrics.

        `pipelines.roles` calls this in the pipeline's process, once per optimiser step or streamed part, each time with another
        `seed`. `step_batch` packs all samples of the step or part as numpy arrays. The annotations go with their tokens into
        the micro-batches, whose denominators count the kept tokens. The loss itself has no state."""


# Cluster and tracking


class Pending(Protocol):
    """The future result of a call."""

    def result(self) -> Any:
        """Waits for the result. Past the cluster's deadline, raises a DeadlineError that names role and method."""

    def __await__(self) -> Generator[Any, None, Any]: ...


class Workers(Protocol):
    """The `size` ranks of one role, in `dp_size` data-parallel replicas. Calls don't block."""

    size: int
    dp_size: int

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Pending:
        """Calls a method of the ranks. The route `split` cuts every positional argument, a list, into equal shares for the
        data-parallel ranks, gives all ranks the keyword arguments, and joins the returned lists in order. `broadcast` gives all
        ranks the same and returns rank 0's answer. `rank0` calls rank 0 only."""

    def at(self, rank: int) -> "RankCalls":
        """One rank, to be called alone. Raises WorkerError if the role has no such rank."""


class RankCalls(Protocol):
    """One rank of a role."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Calls a method of this rank alone. Calls of one rank run one after the other, whoever made them."""


class Cluster(Protocol):
    """Spawns roles, in this process or in others."""

    @property
    def placement(self) -> Placement:
        """Where the roles of the run are."""

    @property
    def neighbours(self) -> Mapping[str, Any]:
        """The workers in this process, by role."""

    def spawn(self, role: str, factory: Callable[[RankContext], Any], *, beside: str = "") -> Workers:
        """Starts a role. Each rank calls `factory` with its context, whose stopwatch reports to the run's stopwatch. With
        `beside`, the ranks are those of another role, which has been spawned, and its workers are their neighbours."""

    def keep_first_ranks(self) -> bool:
        """After a failure, ends the processes that host no role's first rank. Returns whether the first ranks can still be
        called to save their state: they can't while they wait for an all-reduce with the ended ranks."""

    def shutdown(self) -> None: ...


class StepTexts(NamedTuple):
    """Texts that trackers get with a step's metrics: sentences on the run's health, by condition, and sample trajectories."""

    health: Mapping[str, str] = MappingProxyType({})
    brief: str = ""
    """A few lines of the best sample, for people who watch."""
    samples: str = ""


NO_TEXTS = StepTexts()


class Tracker(Protocol):
    """Receives the metrics of a step, already reduced, and its texts."""

    def log(self, step: int, metrics: Mapping[str, float], texts: StepTexts = NO_TEXTS) -> None: ...

    def close(self) -> None: ...
