"""Shows traces as text: one line an episode, or one line a span."""

from collections.abc import Mapping
from typing import Any

from turnwise.tracking.spans import Span, Trace

_WIDTH = 100


def trace_line(trace: Trace) -> str:
    """One line: step, task, sibling, how the episode ended, its spans and seconds."""
    tags = trace.tags
    split = "  val" if tags.get("validate") else ""
    score = "" if tags.get("score") is None else f"  score {tags['score']:g}"
    episode = trace.spans[0]
    seconds = (episode.end_ns - episode.start_ns) / 1e9
    return (
        f"step {tags['step']}{split}  {tags['task']}  sibling {tags['rollout_n']}  {tags['status']}{score}"
        f"  {len(trace.spans)} spans  {seconds:.3f} s"
    )


def trace_text(trace: Trace) -> str:
    """The line of the episode, and a line of each span: when it began, how long it took, and what it was."""
    episode = trace.spans[0]
    lines = [trace_line(trace)]
    if episode.error:
        lines.append(f"error: {_short(episode.error)}")
    for span in sorted(trace.spans[1:], key=lambda span: span.start_ns):
        begins = (span.start_ns - episode.start_ns) / 1e9
        lasts = (span.end_ns - span.start_ns) / 1e9
        indent = "  " if span.parent else ""
        lines.append(f"{begins:9.3f} s {lasts:9.3f} s  {indent}{span.name:20} {_short(span_text(span))}")
        lines += [f"{'':26}{text}" for text in _texts(span)]
    return "\n".join(lines)


def span_text(span: Span) -> str:
    """What a span was: a call with its result, the tokens of a response. Raises KeyError if it lacks an
    attribute of its kind."""
    values = span.attributes
    if span.error and span.kind != "tool":
        return f"error: {span.error}"
    match span.kind:
        case "generate":
            return _generated(values)
        case "tool":
            state = "error" if span.error else "result"
            call = f"{values['gen_ai.tool.call.arguments']} → {state} {values['gen_ai.tool.call.result']!r}"
            return call + _waited(values)
        case "env_step":
            ended = ", ended" if values["turnwise.ended"] else ""
            return f"{values['turnwise.action']!r} → reward {values['turnwise.reward']:g}{ended}"
        case "user":
            return repr(values["turnwise.user_text"])
        case "reward":
            return f"score {values['turnwise.reward']}"
        case _:
            return ""


def _generated(values: Mapping[str, Any]) -> str:
    if "turnwise.turn" not in values:
        return f"context {values['turnwise.context']}: no room for a response"
    finish = values["gen_ai.response.finish_reasons"][0]
    speed = ""
    if "turnwise.tokens_per_s" in values:
        speed = f", {values['turnwise.tokens_per_s']:g} tok/s"
    return (
        f"turn {values['turnwise.turn'] + 1}, context {values['turnwise.context']}: "
        f"{values['turnwise.reused_tokens']} + {values['turnwise.new_tokens']} tokens read, "
        f"{values['gen_ai.usage.output_tokens']} sampled{speed}, {finish}"
    )


def _waited(values: Mapping[str, Any]) -> str:
    waited = values["turnwise.waited_s"]
    return f", waited {waited:.3f} s for a place" if waited >= 0.001 else ""


def _texts(span: Span) -> list[str]:
    names = {"turnwise.prompt_text": "reads", "turnwise.response_text": "says"}
    return [
        f"{says:5} {_short(repr(span.attributes[name]))}"
        for name, says in names.items()
        if name in span.attributes
    ]


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
