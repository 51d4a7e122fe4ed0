"""Published forms of rows besides messages: ShareGPT, Alpaca, question with answer, prompt with
completion."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.data.answers import stated_answer
from turnwise.data.prompts import read_list
from turnwise.errors import DataError
from turnwise.types import Message

COLUMNS: dict[str, tuple[str, ...]] = {
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "prompt_completion": ("prompt", "completion"),
}
"""Form → the columns that every row of it has."""
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The names that ShareGPT's rows give to speakers → roles."""


def form_of(columns: Mapping[str, Any]) -> str | None:
    """The form whose columns the row has; None if it has those of none."""
    return next(
        (form for form, names in COLUMNS.items() if all(columns.get(name) is not None for name in names)),
        None,
    )


def form_hint(columns: Mapping[str, Any]) -> str:
    """The end of a message about a row without the column that was looked for: the form that it has, and how
    to read it."""
    form = form_of(columns)
    if form is not None:
        return f" It has {' and '.join(COLUMNS[form])}: data.format={form} reads such rows"
    if columns.get("messages") is not None:
        return (
            " It has messages: data.prompt_key=messages takes all of them for the prompt, which must end "
            "before the answer"
        )
    if {"chosen", "rejected"} <= columns.keys():
        return (
            " Rows of preferences aren't trained on in this version; make a row with messages of the "
            "chosen answer"
        )
    return ""


def as_messages(columns: Mapping[str, Any], form: str) -> list[Message]:
    """The whole conversation of a row. Raises DataError, without the row's place, if the row isn't of the
    form."""
    missing = [name for name in COLUMNS[form] if columns.get(name) is None]
    if missing:
        has = ", ".join(columns) or "none"
        hint = (
            " Rows of messages are read without data.format"
            if columns.get("messages") is not None
            else form_hint(columns)
        )
        raise DataError(f"has no column {missing[0]!r}, which data.format {form} reads; it has {has}.{hint}")
    return _MAKERS[form](columns)


def as_demonstration(columns: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The row as `messages`, and `tools` if it has any. Raises DataError as `as_messages` does."""
    messages = as_messages(columns, form)
    tools = columns.get("tools")
    return {"messages": messages} if tools is None else {"messages": messages, "tools": tools}


def as_task(columns: Mapping[str, Any], form: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """The row's columns and its prompt: the conversation without its last answer. `ground_truth` becomes that
    answer's text (of an answer that ends in `#### 72`, 72), unless there is such a column. Raises DataError
    as `as_messages` does, or if the conversation doesn't end in an answer."""
    messages = as_messages(columns, form)
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise DataError(
            "doesn't end in an assistant's answer to a prompt, which data.format takes off the prompt"
        )
    *prompt, answer = messages
    is_text = len(prompt) == 1 and prompt[0].get("role") == "user"
    task = {**columns, prompt_key: prompt[0]["content"] if is_text else prompt}
    text = answer.get("content")
    if task.get("ground_truth") is None and isinstance(text, str):
        task["ground_truth"] = (stated_answer(text) or text) if "####" in text else text
    return task


def _of_sharegpt(columns: Mapping[str, Any]) -> list[Message]:
    conversations = read_list(columns["conversations"])
    if not isinstance(conversations, list):
        raise DataError(
            f"has the conversations {str(conversations)[:40]!r}; ShareGPT's form is a list of {{from, value}}"
        )
    system = columns.get("system")
    messages: list[Message] = (
        [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    )
    return [*messages, *(_of_turn(index, turn) for index, turn in enumerate(conversations))]


def _of_turn(index: int, turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(
            f"has {str(turn)[:40]!r} as its conversations[{index}]; ShareGPT's form is {{from, value}}"
        )
    turn = {key: value for key, value in turn.items() if value is not None}
    speaker = turn.get("from", turn.get("role"))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(
            f"has the speaker {str(speaker)[:40]!r} in conversations[{index}]; known are {', '.join(_ROLES)}"
        )
    text = turn.get("value", turn.get("content"))
    others = {key: value for key, value in turn.items() if key not in ("from", "role", "value", "content")}
    if speaker == "function_call":
        return {"role": role, "content": None, "tool_calls": _calls(index, text), **others}
    return {"role": role, "content": text, **others}


def _calls(index: int, text: Any) -> list[dict[str, Any]]:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"has the call {str(text)[:40]!r} in conversations[{index}]; it is JSON, {{name, arguments}}"
        )
    return [{"type": "function", "function": dict(call)} for call in calls]


def _of_alpaca(columns: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if columns.get("system"):
        messages.append({"role": "system", "content": columns["system"]})
    for pair in columns.get("history") or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(
                f"has {str(pair)[:40]!r} in its history; Alpaca's form is pairs of instruction and answer"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction, context = columns["instruction"], columns.get("input")
    content = f"{instruction}\n\n{context}" if context else instruction
    return [
        *messages,
        {"role": "user", "content": content},
        {"role": "assistant", "content": columns["output"]},
    ]


def _of_question(columns: Mapping[str, Any]) -> list[Message]:
    return [
        {"role": "user", "content": columns["question"]},
        {"role": "assistant", "content": columns["answer"]},
    ]


def _of_prompt(columns: Mapping[str, Any]) -> list[Message]:
    prompt, completion = read_list(columns["prompt"]), read_list(columns["completion"])
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    after = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    return [*before, *after]


_MAKERS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "question_answer": _of_question,
    "prompt_completion": _of_prompt,
}
