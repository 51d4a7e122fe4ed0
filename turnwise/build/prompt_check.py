"""Checks prompts of rows against the chat template that shows them."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from turnwise.chat.rendering import texts_of
from turnwise.chat.template import ChatTemplate
from turnwise.data.rewards import prompt_of
from turnwise.rollout.tasks import DataRow
from turnwise.types import Message

logger = logging.getLogger(__name__)


def continued_problem(prompt: Sequence[Mapping[str, Any]]) -> str:
    """What keeps a response from continuing a prompt whose last message is an assistant's; "" for a prompt without fault."""
    if prompt[-1].get("role") != "assistant":
        return ""
    if prompt[-1].get("tool_calls"):
        return "ends with tool calls, and no message of role tool holds their results"
    return "holds nothing but an assistant's words" if len(prompt) == 1 else ""


def warn_of_turn_tokens(rows: Sequence[tuple[str, DataRow]], prompt_key: str, template: ChatTemplate, files: str) -> None:
    """Warns if texts of prompts hold tokens with which the template begins or ends turns, as `warn_of_turn_tokens_in` does."""
    prompts = [(place, prompt_of(row.payload, prompt_key)) for place, row in rows]
    warn_of_turn_tokens_in(prompts, template, files)


def warn_of_turn_tokens_in(conversations: Sequence[tuple[str, Sequence[Message]]], template: ChatTemplate, files: str) -> None:
    """Warns if texts of messages hold tokens with which the template begins or ends turns: the template writes its own around
    them. The warning names the first such row and token, and says how many rows have one."""
    tokens = template.turn_tokens
    if not tokens:
        return
    spelt = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    first, num_rows = "", 0
    for place, messages in conversations:
        texts = (text for message in messages for text in texts_of(message))
        token = next((match.group() for text in texts if (match := spelt.search(text))), "")
        num_rows += bool(token)
        if token and not first:
            first = f"{place}: a message holds {token}"
    if first:
        _warn(first, num_rows, len(conversations), files)


@lru_cache(maxsize=64)  # a run reads its rows more than once
def _warn(first: str, num_rows: int, num_all: int, files: str) -> None:
    logger.warning(
        "%s, a token with which this model's chat template begins or ends turns (%d of %d rows of %s hold one). The template "
        "writes its own around each message, so the model would see them twice: give the prompt as a list of messages, and the "
        "beginning of an answer as a last message of role assistant",
        first,
        num_rows,
        num_all,
        files,
    )
