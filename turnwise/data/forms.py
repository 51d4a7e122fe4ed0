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
    for form, names in COLUMNS.items():
        if all(columns.get(name) is not None for name in names):
            return form
    return None


def form_hint(columns: Mapping[str, Any]) -> str:
    """The end of a message about a row without the column that was looked for: the form that it has, and how
    to read it."""
    form = form_of(columns)
    if form is not None:
        return f" It has {' and '.join(COLUMNS[form])}: data.format={form} reads such rows"
    if columns.get("messages") is not None:
        return (
            " It has messages: data.prompt_key=messages uses all of them as the prompt, which must end "
            "before the answer"
        )
    if {"chosen", "rejected"} <= columns.keys():
        return (
            " Training on rows of preferences isn't supported yet; make a row with messages of the "
            "chosen answer"
        )
    return ""


def as_messages(columns: Mapping[str, Any], form: str) -> list[Message]:
    """The whole conversation of a row. Raises DataError, without the row's place, if the row isn't of the
    form."""
    missing = [name for name in COLUMNS[form] if columns.get(name) is None]
    if missing:
        names = ", ".join(columns) or "none"
        if columns.get("messages") is not None:
            hint = " Rows of messages are read without data.format"
        else:
            hint = form_hint(columns)
        raise DataError(
            f"has no column {missing[0]!r}, which data.format {form} reads; it has {names}.{hint}"
        )
    return _MAKERS[form](columns)


def as_demonstration(columns: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The row as `messages`, and `tools` if it has any. Raises DataError as `as_messages` does."""
    demonstration: dict[str, Any] = {"messages": as_messages(columns, form)}
    tools = columns.get("tools")
    if tools is not None:
        demonstration["tools"] = tools
    return demonstration


def as_task(columns: Mapping[str, Any], form: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """The row's columns and its prompt: the conversation without its last answer. `ground_truth` becomes that
    answer's text (of an answer that ends in `#### 72`, 72), unless there is such a column. Raises DataError
    as `as_messages` does, or if the conversation doesn't end in an answer."""
    messages = as_messages(columns, form)
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise DataError(
            "doesn't end in an assistant's answer to a prompt, which data.format removes from the prompt"
        )
    *prompt, answer = messages
    is_text = len(prompt) == 1 and prompt[0].get("role") == "user"
    task = {**columns, prompt_key: prompt}
    if is_text:
        task[prompt_key] = prompt[0]["content"]
    text = answer.get("content")
    if task.get("ground_truth") is not None or not isinstance(text, str):
        return task
    task["ground_truth"] = text
    if "####" in text:
        task["ground_truth"] = stated_answer(text) or text
    return task


def _of_sharegpt(columns: Mapping[str, Any]) -> list[Message]:
    conversations = read_list(columns["conversations"])
    if not isinstance(conversations, list):
        raise DataError(
            f"has the conversations {str(conversations)[:40]!r}; ShareGPT's form is a list of {{from, value}}"
        )
    messages: list[Message] = []
    system = columns.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(conversations):
        messages.append(_of_turn(index, turn))
    return messages


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
    extra = {key: value for key, value in turn.items() if key not in ("from", "role", "value", "content")}
    if speaker == "function_call":
        calls = _calls(index, text)
        return {"role": role, "content": None, "tool_calls": calls, **extra}
    return {"role": role, "content": text, **extra}


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
        messages += _exchange(pair[0], pair[1])
    instruction = columns["instruction"]
    context = columns.get("input")
    content = f"{instruction}\n\n{context}" if context else instruction
    return messages + _exchange(content, columns["output"])


def _exchange(question: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _of_question(columns: Mapping[str, Any]) -> list[Message]:
    return _exchange(columns["question"], columns["answer"])


def _of_prompt(columns: Mapping[str, Any]) -> list[Message]:
    prompt = _as_messages_of("user", columns["prompt"])
    completion = _as_messages_of("assistant", columns["completion"])
    return [*prompt, *completion]


def _as_messages_of(role: str, value: Any) -> list[Message]:
    messages = read_list(value)
    if isinstance(messages, list):
        return messages
    return [{"role": role, "content": messages}]


_MAKERS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "question_answer": _of_question,
    "prompt_completion": _of_prompt,
}
