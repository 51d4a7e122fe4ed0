"""Turns recorded conversations into Samples, with the ids that a rollout would have produced."""

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from turnwise.chat.message_content import Messages, num_characters_of
from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.errors import DataError
from turnwise.types import Message, Sample, TurnSpan

logger = logging.getLogger(__name__)

_PROMPT_ROLES = ("system", "user", "tool")
TRAINING_FLAGS = ("weight", "loss_mask", "trainable", "train", "loss")
"""Keys by which other systems' rows say whether an assistant's message is trained: 1 or true, 0 or false;
null = absent."""
_KEYS = {
    "system": ("name",),
    "user": ("name",),
    "tool": ("name", "tool_call_id"),
    "assistant": ("tool_calls",),
}
"""Role → the keys that its messages may have besides `role` and `content`."""
_LEARNT = (
    "only `content` as a string and `tool_calls` are learnt from: write thinking into the text, in the form "
    "that the model is to say"
)


class TooLongError(DataError):
    """A conversation has more tokens than fit."""


def encode_demonstration(
    template: ChatTemplate,
    messages: Messages,
    tools: Tools = (),
    max_length: int | None = None,
) -> Sample:
    """Encodes a conversation as a Sample [N]. The response mask is True on the assistant's texts, calls and
    end-of-turn tokens.

    The conversation is encoded turn by turn, like a rollout whose model samples exactly these texts. An
    assistant message with one of `TRAINING_FLAGS` that is 0 or false is context: it is encoded, and the mask
    is False on it. Raises ChatTemplateError if the template refuses the messages; DataError as
    `check_demonstration` does; TooLongError if the conversation has more than `max_length` tokens, or
    certainly would have.

    >>> from turnwise.testing.fakes import byte_tokenizer
    >>> template = ChatTemplate(byte_tokenizer())
    >>> messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    >>> sample = encode_demonstration(template, messages)
    >>> template.tokenizer.decode(sample.token_ids[sample.response_mask])
    'Ho<|im_end|>'
    """
    num_characters = num_characters_of(messages)
    if max_length is not None and num_characters > template.max_characters(max_length):
        raise TooLongError(
            f"the conversation has {num_characters} characters, more than fit into sequence_length "
            f"{max_length}"
        )
    token_ids: list[int] = []
    spans: list[TurnSpan] = []
    response: list[int] = []
    for turn, (prompt, answer, is_trained) in enumerate(_exchanges(messages)):
        if turn == 0:
            token_ids += template.start(prompt, tools)
        else:
            token_ids += template.extend(response, prompt, tools)
        response = template.respond_with(answer)
        if is_trained:
            start = len(token_ids)
            spans.append(TurnSpan(turn, start, start + len(response)))
        token_ids += response
    if max_length is not None and len(token_ids) > max_length:
        raise TooLongError(
            f"the conversation has {len(token_ids)} tokens, more than sequence_length {max_length}"
        )

    mask = np.zeros(len(token_ids), dtype=np.bool_)
    for span in spans:
        mask[span.start : span.stop] = True
    return Sample(
        token_ids=np.array(token_ids, dtype=np.int64),
        response_mask=mask,
        rollout_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        turn_spans=tuple(spans),
    )


def check_demonstration(messages: Messages) -> bool:
    """Whether every trained answer has a text or a call. Raises DataError if a message has an unknown role or
    key, or a flag that isn't 0 or 1; if an assistant message comes first, follows another one, or has
    anything but a text and tool calls; if messages follow the last one; or if no assistant message is
    trained."""
    answers = [answer for _, answer, is_trained in _exchanges(messages) if is_trained]
    return all(answer.get("tool_calls") or answer["content"].strip() for answer in answers)


def check_row_flags(columns: Mapping[str, Any]) -> None:
    """Raises DataError if one of `TRAINING_FLAGS` stands beside a row's messages and says that none of them
    is trained, or lists which are. A warning names any other value, since it has no effect."""
    for key in TRAINING_FLAGS:
        value = columns.get(key)
        if value is None or value in (1, True):
            continue
        if isinstance(value, list):
            raise DataError(
                f"the row has a list as its `{key}`; write `{key}`: 0 into each message that isn't to be "
                "trained"
            )
        if isinstance(value, int | float) and value == 0:
            raise DataError(f"the row has `{key}` {value!r}, so nothing of it is to be trained: drop it")
        _warn_of_column(key)


@lru_cache(maxsize=64)  # rows are read more than once
def _warn_of_column(key: str) -> None:
    logger.warning(
        "a column `%s` of rows has no effect on training, unless it is 0 or false: all rows weigh alike; "
        "`%s` in a message says whether that is trained",
        key,
        key,
    )


def _exchanges(messages: Messages) -> list[tuple[list[Message], Message, bool]]:
    """Splits the conversation: the messages since the last answer, the assistant's next answer, and whether
    that is trained."""
    exchanges: list[tuple[list[Message], Message, bool]] = []
    prompt: list[Message] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in _KEYS:
            raise DataError(
                f"message {index} has the role {role!r}; allowed: {', '.join(_PROMPT_ROLES)}, assistant"
            )
        is_trained = _is_trained(index, message)
        _check_keys(index, message)
        plain = {key: value for key, value in message.items() if key not in TRAINING_FLAGS}
        if role in _PROMPT_ROLES:
            prompt.append(plain)
        elif not prompt:
            place = "at the start" if index == 0 else "after another assistant message"
            raise DataError(
                f"message {index} is an assistant's {place}: put what it answers before it, or join them"
            )
        else:
            exchanges.append((prompt, _answer(index, plain), is_trained))
            prompt = []
    if not exchanges:
        raise DataError(
            "the conversation has no assistant message, so there is nothing to learn: add one or drop the row"
        )
    if prompt:
        raise DataError(
            f"{len(prompt)} message(s) come after the last assistant message, where nothing is learnt from "
            "them: drop them"
        )
    if not any(is_trained for _, _, is_trained in exchanges):
        flags = ", ".join(TRAINING_FLAGS)
        raise DataError(
            f"each assistant message is only context ({flags}), so there is nothing to learn: drop the row"
        )
    return exchanges


def _is_trained(index: int, message: Message) -> bool:
    """Whether the message is an assistant's without a flag that is 0 or false."""
    role = message["role"]
    flags = {key: message[key] for key in TRAINING_FLAGS if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"message {index} has `{key}` {str(value)[:40]!r} of type {type(value).__name__}; it is 1 "
                "or true if the message is trained, and 0 or false if it is only context: losses of single "
                "messages aren't weighted otherwise"
            )
        if value and role != "assistant":
            raise DataError(
                f"message {index} has `{key}` {value!r} and the role {role!r}; only the assistant's "
                "messages are trained, so remove the key, or set it to 0"
            )
    return role == "assistant" and all(flags.values())


def _check_keys(index: int, message: Message) -> None:
    """Raises DataError for a key that would have no effect. Null and an empty list say nothing."""
    role = message["role"]
    allowed = ("role", "content", *_KEYS[role], *TRAINING_FLAGS)
    without_effect: list[str] = []
    for key, value in message.items():
        if key not in allowed and value is not None and value != []:
            without_effect.append(str(key))
    if not without_effect:
        return
    keys = ", ".join(sorted(without_effect))
    if role == "assistant":
        raise DataError(f"assistant message {index} has the keys {keys}; {_LEARNT}")
    raise DataError(
        f"message {index} has the keys {keys}; a {role} message has {', '.join(allowed)}: remove it"
    )


def _answer(index: int, message: Message) -> Message:
    content = message.get("content")
    calls = message.get("tool_calls")
    has_only_calls = calls and content is None
    if not isinstance(content, str) and not has_only_calls:
        raise DataError(f"assistant message {index} has content of type {type(content).__name__}; {_LEARNT}")
    if not calls:
        return message
    return {**message, "content": content or "", "tool_calls": list(map(_with_read_arguments, calls))}


def _with_read_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object: OpenAI writes them as JSON text, while chat templates read an
    object."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
