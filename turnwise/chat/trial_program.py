"""Renders conversations of every kind with a chat template. `trial.py` runs this file in a process that it
can kill. The file imports neither turnwise nor transformers, so the process takes only a tenth of a
second."""

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Objects = list[dict[str, Any]]
NUM_TURNS = 100
FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
_CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "look", "arguments": {"side": "left"}},
}
_TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"side": {"type": "string", "description": "Which."}},
        "required": ["side"],
    },
}


def conversations() -> Iterator[tuple[Objects, Objects | None]]:
    """Yields `(messages, tools)`: conversations of 100 turns, and short ones of every kind, also with
    contents as lists."""
    user = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    system = {"role": "system", "content": "d"}
    called = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "e",
        "thinking": "e",
        "tool_calls": [_CALL],
    }
    result = {"role": "tool", "name": "look", "tool_call_id": "abcdef123", "content": "f"}
    tools = [{"type": "function", "function": _TOOL}]
    long: Objects = [system, *[user, answer] * NUM_TURNS]
    short: Objects = [user, user, answer, system]
    short += [user, called, result, result, answer] * 2
    yield long, None
    yield long[1:-1], tools
    yield short, tools
    for messages in (long[:5], short):
        yield list(map(_in_parts, messages)), tools


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": message["content"]}, {"type": "image"}]
    return {**message, "content": content}


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    jinja.globals["raise_exception"] = _refuse
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _limit(cpu_s: int, num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system: the caller's own limit remains
        return
    for kind, limit in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, num_bytes)):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, hard))


def main() -> None:
    task = json.load(sys.stdin)
    _limit(task["cpu_s"], task["num_bytes"])
    for source in task["sources"]:
        template = environment().from_string(source)
        for messages, tools in conversations():
            for opens_answer in (True, False):
                try:
                    template.render(
                        messages=messages,
                        tools=tools,
                        add_generation_prompt=opens_answer,
                        **task["variables"],
                    )
                except FAULTS:  # a template may refuse any conversation; here it only has to end
                    continue


if __name__ == "__main__":
    main()
