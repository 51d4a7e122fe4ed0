"""Keeps traces in MLflow, in the experiment of the run's metrics. Traces and their spans are sent in bulk by
MLflow's own inner client: its public, asynchronous exporter discards what its queue of 1,000 can't hold."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.tracking.mlflow_store import open_experiment
from turnwise.tracking.spans import Decode, Trace
from turnwise.tracking.store import TrackedRun

MAX_SPANS = 1000
"""Number of spans in one call."""

_SPAN_TYPES = {
    "episode": "AGENT",
    "generate": "CHAT_MODEL",
    "server_wait": "TASK",
    "tool": "TOOL",
    "env_step": "TASK",
    "user": "AGENT",
    "agent": "CHAIN",
    "reward": "EVALUATOR",
}
_INPUTS = {
    "turnwise.prompt_ids": "prompt_ids",
    "turnwise.prompt_text": "prompt_text",
    "turnwise.action": "action",
    "gen_ai.tool.call.arguments": "arguments",
}
_OUTPUTS = {
    "turnwise.response_ids": "response_ids",
    "turnwise.response_text": "response_text",
    "turnwise.user_text": "text",
    "turnwise.reward": "reward",
    "turnwise.ended": "ended",
    "gen_ai.tool.call.result": "result",
}
"""Attributes that MLflow's page shows as a span's inputs and outputs, under these names."""


class MlflowTraces:
    """Writes traces to an experiment of MLflow. With `decode` the texts of responses are beside their token
    ids. The other arguments are those of `MlflowStore`."""

    def __init__(
        self,
        run: TrackedRun,
        decode: Decode | None,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        artifact_location: str | None = None,
    ) -> None:
        from mlflow.tracing.client import TracingClient

        # MLflow logs each statement that its database refuses, with a stack; the run says it once.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        client, self._experiment_id = open_experiment(
            run,
            tracking_uri,
            experiment_name,
            artifact_location,
        )
        self._client = TracingClient(client.tracking_uri)
        self._decode = decode
        self.place = f"experiment {self._experiment_id} in {client.tracking_uri}"

    def write(self, traces: Sequence[Trace]) -> list[str]:
        from mlflow.exceptions import MlflowException

        try:
            self._write(traces)
        except MlflowException as fault:
            is_refused = fault.get_http_status_code() in range(400, 500)
            if not is_refused or len(traces) == 1:
                raise
            return self._write_one_by_one(traces)
        return []

    def _write_one_by_one(self, traces: Sequence[Trace]) -> list[str]:
        """Writes the traces that MLflow doesn't refuse, and returns its reasons for the others."""
        from mlflow.exceptions import MlflowException

        refused = []
        for trace in traces:
            try:
                self._write([trace])
            except MlflowException as fault:
                refused.append(f"MLflow refuses a trace: {fault}")
        return refused

    def _write(self, traces: Sequence[Trace]) -> None:
        from mlflow.entities.span import Span

        spans: list[Any] = []
        for trace in traces:
            written = trace.written(self._decode)
            self._client.start_trace(self._info(trace))
            spans += [Span.from_dict(record) for record in mlflow_spans(written)]
        for start in range(0, len(spans), MAX_SPANS):
            self._client.log_spans(self._experiment_id, spans[start : start + MAX_SPANS])

    def _info(self, trace: Trace) -> Any:
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        episode = trace.spans[0]
        tags = {name: _tag(value) for name, value in trace.tags.items() if value is not None}
        state = TraceState.ERROR if episode.error else TraceState.OK
        return TraceInfo(
            trace_id=f"tr-{trace.trace_id}",
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=episode.start_ns // 1_000_000,
            state=state,
            request_preview=f"{tags['task']}, sibling {tags['rollout_n']}",
            response_preview=f"{tags['status']}, score {tags.get('score', 'none')}",
            execution_duration=(episode.end_ns - episode.start_ns) // 1_000_000,
            tags={"mlflow.traceName": episode.name, **tags},
        )

    def close(self) -> None: ...


def _tag(value: Any) -> str:
    """A tag as the published system writes it: Python's `str`, shortened to what MLflow takes."""
    return str(value)[:5000]


def mlflow_spans(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The spans of a written trace, in the form that MLflow's `Span.from_dict` reads."""
    trace_id = f"tr-{trace['trace']}"
    spans = []
    for number, span in enumerate(trace["spans"]):
        attributes = dict(span["attributes"])
        values = {
            "mlflow.traceRequestId": trace_id,
            "mlflow.spanType": _SPAN_TYPES[span["kind"]],
            "mlflow.spanInputs": _taken(attributes, _INPUTS),
            "mlflow.spanOutputs": _taken(attributes, _OUTPUTS),
        }
        if number == 0:
            values["mlflow.spanInputs"] = {key: trace["tags"][key] for key in ("task", "rollout_n")}
            values["mlflow.spanOutputs"] = {key: trace["tags"][key] for key in ("status", "score")}
        if span["kind"] == "generate" and "gen_ai.usage.input_tokens" in attributes:
            values["mlflow.chat.tokenUsage"] = _usage(attributes)
        parent = span["parent"]
        parent_id = None if parent is None else _span_id(parent)
        code = "ERROR" if span["error"] else "OK"
        spans.append(
            {
                "trace_id": trace_id,
                "span_id": _span_id(number),
                "parent_span_id": parent_id,
                "name": span["name"],
                "start_time_unix_nano": span["start_ns"],
                "end_time_unix_nano": max(span["end_ns"], span["start_ns"]),
                "status": {"code": code, "message": span["error"]},
                "attributes": {name: json.dumps(value) for name, value in (attributes | values).items()},
            }
        )
    return spans


def _taken(attributes: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Removes attributes, and returns them under their new names."""
    return {new: attributes.pop(name) for name, new in names.items() if name in attributes}


def _usage(attributes: Mapping[str, Any]) -> dict[str, int]:
    num_read = attributes["gen_ai.usage.input_tokens"]
    num_sampled = attributes["gen_ai.usage.output_tokens"]
    return {
        "input_tokens": num_read,
        "output_tokens": num_sampled,
        "total_tokens": num_read + num_sampled,
    }


def _span_id(number: int) -> str:
    """The id of a span in its trace: 16 hexadecimal digits, not all 0."""
    return f"{number + 1:016x}"
