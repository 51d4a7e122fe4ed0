"""Checks prompts of rows against the chat template that shows them: their length, and tokens that only a
template writes."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.message_content import texts_of
from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.config import AgenticConfig
from turnwise.data.prompts import prompt_of
from turnwise.data.tables import noting
from turnwise.errors import DataError, counted
from turnwise.rollout.tasks import DataRow
from turnwise.spec import ROWS_TAG, TOOL_AGENTS
from turnwise.types import Message, Split

logger = logging.getLogger(__name__)

_TEMPLATE_BYTES = 256  # more than a chat template adds to a message


def continued_problem(prompt: Sequence[Mapping[str, Any]]) -> str:
    """What keeps a response from continuing a prompt whose last message is an assistant's; "" for a prompt
    without fault."""
    last = prompt[-1]
    if last.get("role") != "assistant":
        return ""
    if last.get("tool_calls"):
        return "ends with tool calls, and no message of role tool holds their results"
    if len(prompt) == 1:
        return "holds nothing but an assistant's words"
    return ""


def warn_of_turn_tokens(
    rows: Sequence[tuple[str, DataRow]], prompt_key: str, template: ChatTemplate, files: str
) -> None:
    """Warns if texts of prompts hold tokens with which the template begins or ends turns, as
    `warn_of_turn_tokens_in` does."""
    prompts = [(place, prompt_of(row.payload, prompt_key)) for place, row in rows]
    warn_of_turn_tokens_in(prompts, template, files)


def warn_of_turn_tokens_in(
    conversations: Sequence[tuple[str, Sequence[Message]]], template: ChatTemplate, files: str
) -> None:
    """Warns if texts of messages hold tokens with which the template begins or ends turns: the template
    writes its own around them. The warning names the first such row and token, and says how many rows have
    one."""
    tokens = template.turn_tokens
    if not tokens:
        return
    longest_first = sorted(tokens, key=len, reverse=True)
    spelt = re.compile("|".join(map(re.escape, longest_first)))
    rows: list[str] = []
    for place, messages in conversations:
        texts = (text for message in messages for text in texts_of(message))
        match = next(filter(None, map(spelt.search, texts)), None)
        if match:
            rows.append(f"{place}: a message holds {match.group()}")
    if rows:
        logger.warning(
            "%s, a token with which this model's chat template begins or ends turns (%d of %d rows of %s "
            "hold one). The template writes its own around each message, so the model would see them twice: "
            "give the prompt as a list of messages, and the beginning of an answer as a last message of role "
            "assistant",
            rows[0],
            len(rows),
            len(conversations),
            files,
        )


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Maximum tokens of a row's prompt, with the template and the tools that it is shown with."""

    num_tokens: int
    setting: str
    """The settings that the number comes from, for messages."""
    files: str
    """The setting that names the rows' files."""
    prompt_key: str
    template: ChatTemplate
    tools: Tools

    @classmethod
    def of(cls, config: AgenticConfig, split: Split, template: ChatTemplate, tools: Tools) -> "PromptLimit":
        """The limit of a split's rows, from `data.max_prompt_length` or from what a response leaves of the
        context."""
        key = config.data.prompt_key
        files = f"data.{split}_files"
        if config.data.max_prompt_length:
            return cls(
                config.data.max_prompt_length,
                "data.max_prompt_length",
                files,
                key,
                template,
                tools,
            )
        room = config.sequence_length - config.max_new_tokens(split, ROWS_TAG)
        if room <= 0:  # a response may fill the context, so a prompt may fill half of it
            room = config.sequence_length // 2
        return cls(room, "sequence_length without max_new_tokens", files, key, template, tools)

    def allows(self, row: DataRow) -> bool:
        """Whether the row's prompt isn't too long."""
        tools = self.tools if row.agent in TOOL_AGENTS else ()
        prompt = row.payload[self.prompt_key]
        num_messages = 1 if isinstance(prompt, str) else len(prompt)
        num_bytes = len(json.dumps(prompt, ensure_ascii=False).encode()) + _TEMPLATE_BYTES * num_messages
        if not tools and num_bytes <= self.num_tokens:
            return True  # no tokenizer makes more tokens than there are bytes
        messages = prompt_of(row.payload, self.prompt_key, tools)
        ids = self.template.start(messages, tools)
        return len(ids) <= self.num_tokens

    def require_one(self, rows: Sequence[tuple[str, DataRow]]) -> None:
        """Raises DataError if no row has a prompt that isn't too long."""
        if not any(self.allows(row) for _, row in rows):
            raise DataError(
                f"{self.files}: all {counted(len(rows), 'prompt')} have more than {self.num_tokens} tokens "
                f"({self.setting}); raise that, or shorten the prompts"
            )

    def fitting(self, rows: Sequence[tuple[str, DataRow]]) -> list[DataRow]:
        """The rows whose prompts aren't too long. A warning counts the others. Raises DataError if all are
        too long."""
        measured = noting(rows, f"measuring the prompts of {self.files}")
        fitting = [row for _, row in measured if self.allows(row)]
        if not fitting:
            self.require_one(rows)
        if len(fitting) < len(rows):
            logger.warning(
                "%s: %d of %d rows are left out, since their prompts have more than %d tokens (%s)",
                self.files,
                len(rows) - len(fitting),
                len(rows),
                self.num_tokens,
                self.setting,
            )
        return fitting
