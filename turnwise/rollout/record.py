"""Writes and reads a trajectory as a line of JSON, which holds all that training needs, except media."""

import json
import math
from collections.abc import Hashable
from dataclasses import fields
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from turnwise.rollout.source import Rejection
from turnwise.types import (
    MAX_ABS,
    ContextsAre,
    FinishReason,
    FloatArray,
    Limit,
    Message,
    Status,
    Task,
    Trajectory,
    Turn,
    VersionRun,
    join_kept_ids,
)
from turnwise.types.completion import SamplingParams

_MAX_SHOWN = 40
_UNWRITTEN = ("seed", "stop_token_ids")
_USUAL = {f.name: f.default for f in fields(SamplingParams) if f.name not in _UNWRITTEN}
_USUAL |= {"max_new_tokens": 0}
"""A record leaves out sampling parameters with these values, except the temperature. `max_new_tokens` is
never 0."""
# Fields that are written as they are.
_OF_TURN = (
    "observation",
    "text",
    "action",
    "reward",
    "finish_reason",
    "metrics",
    "starts_context",
    "parent",
    "is_greedy",
    "is_trained",
)
_SCORES = ("score", "score_kl_penalty", "outcome_rewards", "metrics")
_OF_TRAJECTORY = (
    "sibling",
    "status",
    "limit",
    *_SCORES,
    "error",
    "role",
    "weight",
    "contexts_are",
    "answer_turn",
    "answer",
)


class RecordKey(NamedTuple):
    """The step and the group (`Group.index`) that a line belongs to. The `group_length` lines of a group are
    consecutive."""

    step: int
    group: int
    group_length: int
    rejected: Rejection | None
    is_baseline: bool
    """Whether the trajectory is the group's greedy one."""


class StateKeyWriter:
    """Writes the state keys of one group. Keys are only compared within a group, and equal keys stay equal. A
    key that isn't text, a number or None is written as a number, which stands for it in this group, with its
    `repr` for readers.

    >>> keys = StateKeyWriter()
    >>> keys.encode(7), keys.encode((1, b"door")), keys.encode(frozenset({3}))
    (7, {'object': 0, 'text': "(1, b'door')"}, {'object': 1, 'text': 'frozenset({3})'})
    >>> keys.encode((1, b"door"))["object"]
    0
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def encode(self, key: Hashable) -> Any:
        if isinstance(key, np.generic):
            key = key.item()
        if key is None or isinstance(key, str | int | float):
            return key
        number = self._numbers.setdefault(key, len(self._numbers))
        return {"object": number, "text": repr(key)}


def _read_state_key(value: Any) -> Hashable:
    if isinstance(value, dict) and "object" in value:
        return "object", value["object"]
    if isinstance(value, list | dict):
        return json.dumps(value)
    return value


def write_record(key: RecordKey, trajectory: Trajectory, keys: StateKeyWriter) -> str:
    """The JSON line of a trajectory, without media. `read_record` ignores the advantages. A group's lines
    share one `keys`."""
    advantages = trajectory.advantages_by_turn
    turns = [written_turn(turn, advantages.get(i), keys) for i, turn in enumerate(trajectory.turns)]
    record = {
        **key._asdict(),
        "task": written_task(trajectory.task),
        **{name: getattr(trajectory, name) for name in _OF_TRAJECTORY},
        "turns": turns,
    }
    if trajectory.comments:
        record["comments"] = trajectory.comments
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_type_name)
    # An environment's text may have lone surrogates, which UTF-8 can't encode.
    return line.encode(errors="replace").decode()


def _type_name(value: object) -> str:
    """What stands for an object in a message that JSON can't hold."""
    return type(value).__name__


def written_task(task: Task) -> dict[str, Any]:
    """A task as a JSON object."""
    values = {f.name: getattr(task, f.name) for f in fields(task)}
    return values | {"payload": dict(task.payload)}


def written_turn(
    turn: Turn,
    advantages: FloatArray | None,
    keys: StateKeyWriter,
) -> dict[str, Any]:
    """A turn as a JSON object, which `TurnRecord` reads."""
    record: dict[str, Any] = {
        **{name: getattr(turn, name) for name in _OF_TURN},
        "prompt_ids": turn.prompt_ids.tolist(),
        "response_ids": turn.response_ids.tolist(),
        # Nine significant digits give a float32 back exactly.
        "logprobs": [float(f"{x:.9g}") for x in turn.logprobs],
        "versions": [list(run) for run in turn.versions],
        "state_key": keys.encode(turn.state_key),
        "generate_s": round(turn.generate_s, 6),
        "step_s": round(turn.step_s, 6),
    }
    if turn.kept_ids is not None and turn.kept_offsets is not None:
        spans = pairwise(turn.kept_offsets)
        record["kept_ids"] = [turn.kept_ids[start:stop].tolist() for start, stop in spans]
    if turn.sampling is not None:
        record["sampling"] = _written_sampling(turn.sampling)
    if turn.tool_results is not None:
        record["tool_results"] = turn.tool_results
    if turn.messages:
        record["messages"] = [_written_message(message) for message in turn.messages]
    if turn.tools:
        record["tools"] = list(turn.tools)
    if turn.token_values:
        record["token_values"] = {
            name: [float(f"{value:.3g}") for value in values] for name, values in turn.token_values.items()
        }
    if advantages is not None:
        # Estimators on trajectories or turns give all tokens of a turn the same advantage, which is written
        # once.
        is_constant = len(advantages) > 0 and bool((advantages == advantages[0]).all())
        if is_constant:
            record["advantage"] = float(advantages[0])
        else:
            record["advantage"] = [float(advantage) for advantage in advantages]
    return record


def _written_message(message: Message) -> Message:
    """The message without pictures: a part that isn't text becomes its type."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = [part if "text" in part else {"type": part.get("type")} for part in content]
    return {**message, "content": parts}


def _written_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """The temperature, and those parameters of `_USUAL` that differ from their defaults."""
    values: dict[str, Any] = {}
    for name, usual in _USUAL.items():
        value = getattr(sampling, name)
        if name == "temperature" or value != usual:
            values[name] = value
    return values


def read_record(line: str | bytes) -> tuple[RecordKey, Trajectory]:
    """The key and the trajectory of a line, without samples (`batching.samples.build_samples` makes them). If
    the line isn't what `write_record` writes, raises a ValueError that names the first wrong field."""
    try:
        record = TrajectoryRecord.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error
    values = dict(record)
    del values["score"]
    key = RecordKey(*(values.pop(name) for name in RecordKey._fields))
    values["turns"] = [turn.made() for turn in record.turns]
    return key, Trajectory(**values)


class Record(BaseModel):
    """Base class of JSON objects whose fields have strict types. Unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        extra="ignore",
    )


def _bounded(value: float) -> float:
    if abs(value) > MAX_ABS:
        raise ValueError(f"it is {value:g}, and must be at most {MAX_ABS:g} in size")
    return value


_Index = Annotated[int, Field(ge=0)]
_Number = Annotated[float, AfterValidator(_bounded)]  # a number that an environment may report
_TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class TurnRecord(Record):
    """The JSON object that `written_turn` writes. `made` converts it into a Turn."""

    prompt_ids: _TokenIds
    response_ids: _TokenIds
    logprobs: list[float]
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    text: str
    observation: str
    action: str | None
    reward: _Number
    state_key: Annotated[Hashable, BeforeValidator(_read_state_key)]
    metrics: dict[str, _Number]
    starts_context: bool
    parent: _Index | None
    is_greedy: bool
    is_trained: bool = True
    generate_s: float
    step_s: float
    kept_ids: list[_TokenIds] | None = None
    """For each sampled token, the ids that it was drawn from (after top-k, top-p and min-p)."""
    sampling: SamplingParams | None = None
    tool_results: tuple[str, ...] | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    token_values: dict[str, list[float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        num_sampled = len(self.response_ids)
        num_versions = sum(run.num_tokens for run in self.versions)
        if not num_sampled == len(self.logprobs) == num_versions:
            raise ValueError(
                f"{num_sampled} sampled tokens, but {len(self.logprobs)} log-probs and versions of "
                f"{num_versions}"
            )
        if self.kept_ids is not None and not _hold_tokens(self.kept_ids, self.response_ids):
            raise ValueError("kept_ids: each sampled token needs a list that is empty or holds the token")
        if self.sampling is not None and num_sampled and not self.is_greedy:
            temperature = self.sampling.temperature
            if not 0 < temperature < math.inf:
                raise ValueError(
                    f"sampling.temperature: it is {temperature:g}, and a sampled turn's is above 0"
                )
        return self

    def made(self) -> Turn:
        candidates = []
        for token_ids in self.kept_ids or ():
            span = np.array([0, len(token_ids)])
            candidates.append((np.array(token_ids, np.int32), span, 1))
        ids, offsets = join_kept_ids(candidates)
        arrays = {
            "kept_ids": ids,
            "kept_offsets": offsets,
            "prompt_ids": np.array(self.prompt_ids, dtype=np.int64),
            "response_ids": np.array(self.response_ids, dtype=np.int64),
            "logprobs": np.array(self.logprobs, dtype=np.float32),
            "token_values": {
                name: np.array(values, dtype=np.float32) for name, values in self.token_values.items()
            },
        }
        return Turn(**dict(self) | arrays)


def _hold_tokens(kept_ids: list[list[int]], token_ids: list[int]) -> bool:
    """Whether there is a list for each token, and each list is empty or holds its token."""
    if len(kept_ids) != len(token_ids):
        return False
    pairs = zip(kept_ids, token_ids, strict=True)
    return all(not ids or token in ids for ids, token in pairs)


class TrajectoryRecord(Record):
    """The JSON object of a line, which `write_record` writes."""

    step: _Index
    group: _Index
    group_length: Annotated[int, Field(ge=1)]
    rejected: Rejection | None
    is_baseline: bool
    task: Task
    sibling: _Index
    turns: list[TurnRecord]
    status: Status
    limit: Limit | None
    outcome_rewards: dict[str, _Number]
    metrics: dict[str, _Number]
    comments: dict[str, str] = Field(default_factory=dict)
    error: str | None
    role: str
    weight: Annotated[float, Field(ge=0)]
    # Older files have one trajectory a conversation, whose contexts were samples of their own.
    contexts_are: ContextsAre = "steps"
    answer_turn: _Index | None = None
    answer: str | None = None
    score_kl_penalty: _Number
    score: float

    @model_validator(mode="after")
    def _is_of_its_turns(self) -> Self:
        if not self.turns and self.status != "failed":
            raise ValueError(
                f"turns: it has none, and its status is {self.status}; only a failed episode has no turn"
            )
        if self.answer_turn is not None and self.answer_turn >= len(self.turns):
            raise ValueError(f"answer_turn: it is {self.answer_turn}, and there are {len(self.turns)} turns")
        turn_rewards = sum(turn.reward for turn in self.turns)
        total = turn_rewards + sum(self.outcome_rewards.values())
        if not math.isclose(self.score, total, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(
                f"score: it is {self.score:g}, and the rewards add up to {total:g}; change the rewards"
            )
        return self


def first_fault(error: ValidationError) -> str:
    """The first error of a validation as `field: message`, or only the message if it is about the text as a
    whole.

    >>> try:
    ...     Record.model_validate_json("{")
    ... except ValidationError as error:
    ...     first_fault(error)
    'invalid JSON: EOF while parsing an object at line 1 column 1'
    """
    fault = error.errors(include_url=False)[0]
    field = ""
    for part in fault["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    field = field.removeprefix(".")
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] not in ("missing", "json_invalid", "value_error"):
        value = repr(fault["input"])
        if len(value) > _MAX_SHOWN:
            value = value[: _MAX_SHOWN - 1] + "…"
        message += f" (got {value})"
    message = message[:1].lower() + message[1:]
    return f"{field}: {message}" if field else message
