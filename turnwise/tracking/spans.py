"""The records of a trace: one episode as spans with times, and their JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.types import IntArray, SamplingParams, Turn

Decode = Callable[[Sequence[int]], str]
"""Decodes token ids with their special tokens."""
SpanKind = Literal["episode", "generate", "server_wait", "tool", "env_step", "user", "agent", "reward"]

_SPAN_BYTES = 600
"""Bytes of a span's JSON without token ids and texts, for an estimate."""
_ID_BYTES = 7


@dataclass(slots=True)
class Span:
    """One thing that took time in an episode."""

    name: str
    kind: SpanKind
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    parent: int | None = 0
    """Index of the span around this one in the trace; None for the episode."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Values that JSON can hold. Those for which OpenTelemetry has a name have that name (`gen_ai.…`); the
    others begin with `turnwise.`."""
    error: str = ""
    """Why it failed; empty if it didn't."""
    turn: Turn | None = None
    """The turn of a `generate`. Its tokens are written into the attributes only when the span is written."""

    @property
    def num_bytes(self) -> int:
        """An estimate of the length of the span's JSON."""
        size = _SPAN_BYTES + len(self.error)
        for value in self.attributes.values():
            if isinstance(value, str):
                size += len(value)
        if self.turn is not None:
            size += _ID_BYTES * self.turn.num_tokens
            size += len(self.turn.text)
        return size

    def written(self, decode: Decode | None) -> dict[str, Any]:
        """The span as a JSON object. With `decode` the texts of a `generate` are beside its token ids."""
        attributes = self.attributes
        if self.turn is not None:
            attributes = attributes | written_tokens(self.turn, decode)
        return {
            "name": self.name,
            "kind": self.kind,
            "parent": self.parent,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "error": self.error,
            "attributes": attributes,
        }


@dataclass(slots=True)
class Trace:
    """One attempt at an episode. The first span is the episode; it is around all others."""

    trace_id: str
    """32 hexadecimal digits."""
    tags: dict[str, Any]
    """What the trace is found by: `step`, `task`, `sample_index`, `rollout_n`, `validate`, `status`,
    `score`, `run` and `experiment_name`."""
    spans: list[Span]

    @property
    def num_bytes(self) -> int:
        """An estimate of the length of the trace's JSON."""
        return sum(span.num_bytes for span in self.spans)

    def written(self, decode: Decode | None) -> dict[str, Any]:
        """The trace as a JSON object: a line of `traces.jsonl`."""
        return {
            "trace": self.trace_id,
            "tags": self.tags,
            "spans": [span.written(decode) for span in self.spans],
        }


def request_attributes(sampling: SamplingParams | None) -> dict[str, Any]:
    """How a response was sampled, under OpenTelemetry's names."""
    if sampling is None:
        return {}
    attributes: dict[str, Any] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.seed": sampling.seed,
    }
    if sampling.top_k > 0:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.stop_strings:
        attributes["gen_ai.request.stop_sequences"] = list(sampling.stop_strings)
    return attributes


def written_tokens(turn: Turn, decode: Decode | None) -> dict[str, Any]:
    """The tokens of a turn, how they were sampled, and what the agent made of them."""
    written: dict[str, Any] = request_attributes(turn.sampling)
    written["turnwise.weight_versions"] = [list(run) for run in turn.versions]
    written["turnwise.reward"] = turn.reward
    written["turnwise.metrics"] = dict(turn.metrics)
    written["turnwise.prompt_ids"] = turn.prompt_ids.tolist()
    written["turnwise.response_ids"] = turn.response_ids.tolist()
    if decode is not None:
        written["turnwise.prompt_text"] = _readable(decode, turn.prompt_ids)
        written["turnwise.response_text"] = _readable(decode, turn.response_ids)
    return written


def _readable(decode: Decode, token_ids: IntArray) -> str:
    text = decode(token_ids.tolist())
    return text.encode(errors="replace").decode()


def json_of(value: Any) -> Any:
    """A value of a tool's or environment's, as JSON can hold it: other objects become their type's name."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_of(inner) for inner in value]
    return type(value).__name__
