"""Turns recorded conversations into Samples, with the ids that a rollout would have produced."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.chat.rendering import Tools, num_characters_of
from turnwise.chat.template import ChatTemplate
from turnwise.errors import DataError
from turnwise.types import Message, Sample, TurnSpan

_PROMPT_ROLES = ("system", "user", "tool")


def encode_demonstration(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools = (), max_length: int | None = None
) -> Sample:
    """Encodes a conversation as a Sample [N]. The response mask is True on the assistant's texts, calls and end-of-turn tokens.

    The conversation is encoded turn by turn, like a rollout whose model samples exactly these texts. Raises ChatTemplateError
    if the template refuses the messages. Raises DataError if a role is unknown, or the last message isn't an assistant's; if an
    assistant message comes first, follows another one, or has anything but a text and tool calls; or if the texts have more
    characters than fit into `max_length` tokens.

    >>> from turnwise.testing.fakes import byte_tokenizer
    >>> template = ChatTemplate(byte_tokenizer())
    >>> sample = encode_demonstration(template, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    >>> template.tokenizer.decode(sample.token_ids[sample.response_mask])
    'Ho<|im_end|>'
    """
    num_characters = num_characters_of(messages)
    if max_length is not None and num_characters > template.max_characters(max_length):
        raise DataError(f"the conversation has {num_characters} characters, more than fit into {max_length} tokens")
    token_ids: list[int] = []
    spans: list[TurnSpan] = []
    response: list[int] = []
    for turn, (prompt, answer) in enumerate(_exchanges(messages)):
        token_ids += template.extend(response, prompt, tools) if turn else template.start(prompt, tools)
        response = template.respond_with_calls(answer) if answer.get("tool_calls") else template.respond(answer["content"])
        spans.append(TurnSpan(turn, len(token_ids), len(token_ids) + len(response)))
        token_ids += response

    mask = np.zeros(len(token_ids), dtype=np.bool_)
    for span in spans:
        mask[span.start : span.stop] = True
    return Sample(
        token_ids=np.array(token_ids, dtype=np.int64),
        response_mask=mask,
        rollout_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        turn_spans=tuple(spans),
    )


def _exchanges(messages: Sequence[Message]) -> list[tuple[list[Message], Message]]:
    """Splits the conversation into pairs: the messages since the last answer, and the assistant's next answer."""
    exchanges: list[tuple[list[Message], Message]] = []
    prompt: list[Message] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in _PROMPT_ROLES:
            prompt.append(message)
        elif role != "assistant":
            raise DataError(f"message {index} has the role {role!r}; allowed: {', '.join(_PROMPT_ROLES)}, assistant")
        elif not prompt:
            where = "at the start" if index == 0 else "after another assistant message"
            raise DataError(f"message {index} is an assistant's {where}: put what it answers before it, or join them")
        else:
            exchanges.append((prompt, _answer(index, message)))
            prompt = []
    if not exchanges:
        raise DataError("the conversation has no assistant message, so there is nothing to learn: add one or drop the row")
    if prompt:
        raise DataError(
            f"{len(prompt)} message(s) come after the last assistant message, where nothing is learnt from them: drop them"
        )
    return exchanges


def _answer(index: int, message: Message) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    extra = sorted(key for key, value in message.items() if key not in ("role", "content", "tool_calls") and value)
    if not (isinstance(content, str) or (calls and content is None)) or extra:
        got = f"the keys {', '.join(extra)}" if extra else f"content of type {type(content).__name__}"
        raise DataError(
            f"assistant message {index} has {got}; only `content` as a string and `tool_calls` are learnt from: write thinking "
            "into the text, in the form that the model is to say"
        )
    return {**message, "content": content or "", "tool_calls": list(map(_read_arguments, calls))} if calls else message


def _read_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object: OpenAI writes them as JSON text, while chat templates read an object."""
    function = call["function"]
    arguments = function.get("arguments", {})
    return {**call, "function": {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}}
