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

NUM_TURNS = 100
FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "look", "arguments": {"side": "left"}}}
_TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"side": {"type": "string", "description": "Which."}},
        "required": ["side"],
    },
}


def conversations() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Yields `(messages, tools)`: conversations of 100 turns, and short ones of every kind, also with
    contents as lists."""
    user: dict[str, Any] = {"role": "user", "content": "a"}
    answer: dict[str, Any] = {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
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
    long: list[dict[str, Any]] = [system, *[user, answer] * NUM_TURNS]
    short: list[dict[str, Any]] = [user, user, answer, system, *[user, called, result, result, answer] * 2]
    yield from ((long, None), (long[1:-1], tools), (short, tools))
    for messages in (long[:5], short):
        yield (
            [{**m, "content": [{"type": "text", "text": m["content"]}, {"type": "image"}]} for m in messages],
            tools,
        )


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _limit(cpu_s: int, num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system: the caller's own limit remains
        return
    for kind, most in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, num_bytes)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    asked = json.load(sys.stdin)
    _limit(asked["cpu_s"], asked["num_bytes"])
    for source in asked["sources"]:
        template = environment().from_string(source)
        for messages, tools in conversations():
            for opens_answer in (True, False):
                try:
                    template.render(
                        messages=messages,
                        tools=tools,
                        add_generation_prompt=opens_answer,
                        **asked["variables"],
                    )
                except FAULTS:  # a template may refuse any conversation; here it only has to end
                    continue


if __name__ == "__main__":
    main()
