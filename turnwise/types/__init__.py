"""The nouns of turnwise: the data that pass between packages.

Standard library and numpy only. Arrays over tokens are one-dimensional; `N` is a number of tokens, `R` a
number of sampled tokens. The nesting is `Group → Trajectory → Turn → token`; a `Sample` is the flat view of
one context (forward passes, credit and training work on samples), and a `Batch` is one micro-batch. Packing
is the last thing that happens to data."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.spec import Split as Split
from turnwise.types.batch import (
    Batch as Batch,
    Denominators as Denominators,
    ModelOutputs as ModelOutputs,
    TokenAnnotations as TokenAnnotations,
)
from turnwise.types.completion import (
    AS_OPENED as AS_OPENED,
    CallOptions as CallOptions,
    Completion as Completion,
    FinishReason as FinishReason,
    FloatArray as FloatArray,
    IntArray as IntArray,
    KeptIds as KeptIds,
    SamplingParams as SamplingParams,
    VersionRun as VersionRun,
    join_kept_ids as join_kept_ids,
)
from turnwise.types.media import Media as Media, Observation as Observation
from turnwise.types.shown import renderer

Message = dict[str, Any]
"""One chat message in the OpenAI form: `{"role": ..., "content": ...}` and, with tools, `tool_calls` or
`tool_call_id`."""

MAX_ABS = 1e30
"""The largest absolute value of a reward or metric. It fits into a float32, and sums of its squares fit into
a float64."""
SAME_SCORE = 1e-6
"""Scores that differ by no more than this are equal: they differ by rounding."""

Status = Literal["finished", "truncated", "failed"]
ContextsAre = Literal["steps", "parts"]
Limit = Literal["max_steps", "max_new_tokens", "sequence_length", "environment", "time"]
Reduction = Literal["mean", "sum", "max", "min", "last"]
"""How numbers combine into one."""
PooledReduction = Literal["p99", "ess"]
"""Reductions that need all values at once: the 99th percentile, and the effective sample size (Σρ)² / (n·Σρ²)
of n ratios ρ."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem, which all trajectories of a group play. Everything random in its initial state follows
    from `seed`."""

    id: str
    tag: str
    """Environment tag of the config, or the name of a data set."""
    split: Split
    seed: int
    epoch: int = 0
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON-serialisable row of a data set; empty for seeded environments."""
    agent: str = ""
    """Name of the agent loop that plays the task; empty if the caller picks the agent."""
    row: int | None = None
    """Row number in the data set, from 0."""

    @property
    def place(self) -> str:
        """Its id and, for a row of a data set, the row's number from 1: for messages."""
        if self.row is None:
            return self.id
        return f"{self.id} (row {self.row + 1})"


@dataclass(slots=True)
class Turn:
    """One model response, with the prompt before it and the environment's result.

    `prompt_ids` [P] are the ids that were *added* to the context before this response: the whole prompt in a
    context's first turn, later only the new observation in its template. `response_ids` [R] were sampled. The
    context that the server saw joins both, turn after turn, beginning at the last turn with `starts_context`;
    where history branched, follow `parent`.

    >>> logprobs = np.array([-0.5, -0.1])
    >>> turn = Turn(prompt_ids=np.array([1, 2, 3]), response_ids=np.array([7, 8]), logprobs=logprobs)
    >>> turn.num_tokens
    5
    """

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray
    versions: tuple[VersionRun, ...] = ()
    finish_reason: FinishReason = "stop"
    text: str = ""
    """The decoded response, for parsing and reading. Never encoded again."""
    observation: str = ""
    media: tuple[Media, ...] = ()
    action: str | None = None
    """The action given to the environment, None if nothing could be parsed."""
    reward: float = 0.0
    state_key: Hashable = None
    """The environment's `state_key()` before this turn's action, or the observation if it has no such method.
    For GiGPO."""
    metrics: dict[str, float] = field(default_factory=dict)
    starts_context: bool = False
    parent: int | None = None
    """Index of the turn whose context this turn continues; None = the previous turn. With `starts_context`,
    index of the turn that the new context branches off."""
    is_greedy: bool = False
    is_trained: bool = True
    """False: the response is read as context, but never trained on: no client has got it, or it isn't the
    policy's to learn."""
    generate_s: float = 0.0
    step_s: float = 0.0
    kept_ids: KeptIds | None = None  # [K] and [R + 1], as in `Completion`
    kept_offsets: IntArray | None = None
    sampling: SamplingParams | None = None
    """The sampling parameters. Files leave out seed and stop tokens. None = unknown: the run's own parameters
    are assumed."""
    tool_results: tuple[str, ...] | None = None
    """What the model was shown in answer to the calls of this response, for replays."""
    messages: Sequence[Message] = ()
    """What is new in this turn: the messages before the response, as the model was shown them, and the
    response with its whole text and its `tool_calls`. The conversation sets them; files of older versions
    leave them out."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of the tools that the prompt shows, at the first turn of a context."""
    token_values: dict[str, FloatArray] = field(default_factory=dict)
    """Values [R] of the sampled tokens by name, for reading only (`record_token_values`)."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class TurnSpan(NamedTuple):
    """The positions `start` to `stop` (exclusive) of a turn's sampled tokens in a Sample."""

    turn: int
    start: int
    stop: int


class EpisodeParts:
    """An episode whose contexts are parts. Its samples share one such object."""


@dataclass(slots=True)
class Sample:
    """One context as flat arrays [N]. It is built once, and forward passes and credit assignment write into
    it.

    Arrays align with tokens: entry t of every log-prob, value, advantage or return belongs to token t, given
    the tokens before it (`values[t]` is the value head's output at position t − 1, `next_values[t]` the one
    at t itself). Where `response_mask` is 0 they hold 0.

    >>> sample = Sample(token_ids=np.array([5, 6, 7, 8]), response_mask=np.array([False, False, True, True]),
    ...                 rollout_logprobs=np.zeros(4, np.float32), turn_spans=(TurnSpan(0, 2, 4),))
    >>> sample.num_tokens, sample.num_trained
    (4, 2)
    """

    token_ids: IntArray
    response_mask: NDArray[np.bool_]
    rollout_logprobs: FloatArray
    turn_spans: tuple[TurnSpan, ...]
    versions: tuple[tuple[VersionRun, ...], ...] = ()
    """Policy versions: one tuple of runs per span."""
    weight: float = 1.0
    """Multiplies this context in every loss; 0 for padding rows."""
    kept_ids: KeptIds | None = None
    """int32 [K]: the candidate ids that truncated sampling (top-k, top-p …) kept, those of token t from
    `kept_offsets[t]` to `kept_offsets[t + 1]`. A token with none was drawn from all ids. Rollout and old
    log-probs are normalised over kept ids."""
    kept_offsets: IntArray | None = None  # [N + 1]
    temperatures: FloatArray | None = None
    """float32 [N]: the temperature at which a token was sampled if it differs from the trainer's, else 0.
    None if it differs for no token. All log-probs of a token are at its sampling temperature."""
    old_logprobs: FloatArray | None = None
    old_full_logprobs: FloatArray | None = None
    """Old log-probs [N] over the whole vocabulary, for a KL; None if `old_logprobs` are over the whole
    vocabulary already."""
    ref_logprobs: FloatArray | None = None
    """The reference's log-probs, over the whole vocabulary."""
    values: FloatArray | None = None
    next_values: FloatArray | None = None
    """The value of the state after each token. After the last token of a truncated trajectory it is the
    bootstrap value."""
    advantages: FloatArray | None = None
    returns: FloatArray | None = None
    keep_mask: NDArray[np.bool_] | None = None
    """This and the next three fields are the `TokenAnnotations` of the current optimiser step."""
    importance: FloatArray | None = None
    selected_mask: NDArray[np.bool_] | None = None
    entropy_share: FloatArray | None = None
    media: tuple[Media, ...] = ()
    media_positions: tuple[int, ...] = ()
    episode: EpisodeParts | None = None
    """Shared by the samples that are parts of one episode; None = this sample is all of it, or a step."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return int(self.response_mask.sum())

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """bool [N]: the trained tokens that the loss counts."""
        if self.keep_mask is None:
            return self.response_mask
        return self.response_mask & self.keep_mask

    @property
    def num_counted_turns(self) -> int:
        mask = self.loss_mask
        return sum(bool(mask[span.start : span.stop].any()) for span in self.turn_spans)


@dataclass(slots=True, repr=False)
class Trajectory:
    """One episode, or a part of one (see `weight`): its turns, samples and how it ended. A failure is data,
    not an exception. `limit` names the limit that cut a `truncated` episode. For credit, an episode cut by
    the task's own limits (`max_steps`, `max_new_tokens`, `sequence_length`) is over; after a cut from outside
    (`environment`, `time`) a critic bootstraps."""

    task: Task
    sibling: int
    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    status: Status = "finished"
    limit: Limit | None = None
    outcome_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of the whole episode by name, on top of the turns' own."""
    metrics: dict[str, float] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """What rewards said of the episode by name, for reading only: a judge's words."""
    error: str | None = None
    role: str = "agent"
    weight: float = 1.0
    """1 for a whole episode. If several trajectories make up an episode (sub-agents, compaction), their
    weights add up to 1."""
    contexts_are: ContextsAre = "parts"
    """What several contexts are. `parts`: one conversation that was cut; together they weigh what the same
    tokens weigh in one context. `steps`: each is a sample of its own."""
    answer_turn: int | None = None
    """Index of the turn of the final answer; None = the last turn."""
    answer: str | None = None
    """The final answer, if the agent handed one back; None = the text of the turn of the final answer."""
    score_kl_penalty: float = 0.0
    """β times the sum of the tokens' KL. `credit` writes it, and estimators on trajectory scores subtract
    it."""

    @property
    def score(self) -> float:
        """Σ of turn rewards and outcome rewards, before any KL penalty or normalisation."""
        turn_rewards = sum(turn.reward for turn in self.turns)
        return float(turn_rewards + sum(self.outcome_rewards.values()))

    @property
    def final_turn(self) -> Turn:
        """The turn of the final answer."""
        return self.turns[-1 if self.answer_turn is None else self.answer_turn]

    @property
    def final_text(self) -> str:
        """The final answer."""
        return self.final_turn.text if self.answer is None else self.answer

    @property
    def answer_path(self) -> list[Turn]:
        """The turns of the conversation that ends with the final answer; all turns if no turn is known to
        hold it."""
        if self.answer_turn is None:
            return self.turns
        path: list[Turn] = []
        index: int | None = self.answer_turn
        while index is not None:
            path.append(self.turns[index])
            index = self.turns[index].parent
        return path[::-1]

    def branched_off(self, number: int) -> int | None:
        """The turn that turn `number` continues; None if that is the one before it, or none."""
        parent = self.turns[number].parent
        return None if parent == number - 1 else parent

    @property
    def advantages_by_turn(self) -> dict[int, FloatArray]:
        """Turn index → the advantages [R] of the turn's sampled tokens. Turns of samples without credit are
        left out."""
        return {
            span.turn: sample.advantages[span.start : span.stop]
            for sample in self.samples
            if sample.advantages is not None
            for span in sample.turn_spans
        }

    @property
    def bootstraps(self) -> bool:
        return self.status == "truncated" and self.limit in ("environment", "time")

    def __repr__(self) -> str:
        return renderer().line(self)

    def __str__(self) -> str:
        return renderer().text(self)

    def _repr_html_(self) -> str:
        return renderer().page(self)


@dataclass(slots=True, repr=False)
class Group:
    """The sibling trajectories of one Task: the unit of scheduling, credit, filtering and back-pressure."""

    task: Task
    trajectories: list[Trajectory]
    index: int = 0
    """Position in the order of admission, in which the deterministic profile consumes groups."""
    greedy: Trajectory | None = None
    """The same task played greedily, as a baseline of its siblings (ReMax); never trained on."""
    rejected: Literal["failed", "filtered", "stale"] | None = None
    """Why the group isn't trained on, else None: an episode failed for good, a filter dropped the group, or
    it's too old."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for trajectory in self.trajectories for sample in trajectory.samples]

    def __repr__(self) -> str:
        return renderer().line(self)

    def __str__(self) -> str:
        return renderer().text(self)

    def _repr_html_(self) -> str:
        return renderer().page(self)


class Metric(NamedTuple):
    """One measurement. Any code may return measurements; only `tracking.metrics.reduce_metrics` combines
    them.

    >>> Metric("actor/pg_loss", 3.0, "sum")
    Metric(name='actor/pg_loss', value=3.0, reduction='sum', weight=1.0)
    """

    name: str
    value: Any
    """A number, or a zero-dimensional tensor that is read only at the end of the step. For a pooled
    reduction, an array or tensor [N] of values, each counted once."""
    reduction: Reduction | PooledReduction = "mean"
    weight: Any = 1.0
    """Weight in a mean: a number or a zero-dimensional tensor. Reductions skip measurements of weight 0."""


def are_equal(scores: Sequence[float]) -> bool:
    """Whether the scores differ by rounding only (`SAME_SCORE`). True for no scores.

    >>> are_equal([0.6, 0.1 + 0.2 + 0.3]), are_equal([0.6, 0.6001])
    (True, False)
    """
    return not scores or max(scores) - min(scores) <= SAME_SCORE


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """All samples of the groups, in their order."""
    return [sample for group in groups for sample in group.samples]


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2⁶³) from a stable hash of the parts: the same in every process and version of Python.
    Every random choice of a run is made with such a seed, so that no choice depends on the order of events.

    >>> derive_seed(42, "train", "FrozenLake", 7) == derive_seed(42, "train", "FrozenLake", 7)
    True
    """
    text = "\x1f".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
