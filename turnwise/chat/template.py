"""A chat template as a machine that only ever appends: the first prompt, then what follows each sampled response.

Sampled tokens are never decoded and encoded again. What comes after them is rendered behind a *sentinel* assistant message
in a short made-up conversation and cut behind the sentinel, so that the end-of-turn token, separators and headers are
exactly the template's, and the cost of a turn does not grow with the history. `docs/design/tokens.md` lists the traps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from turnwise.chat.codec import TextCodec
from turnwise.chat.recent import RecentIds, key_of
from turnwise.errors import ChatTemplateError
from turnwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]

_logger = logging.getLogger(__name__)

_SENTINEL = "turnwise8f1e6c0d5b7a4293sentinel"
"""One word of ASCII letters and digits: trimming, splitting at `</think>` and JSON escaping leave it as it is."""

_TEXT_FORMS: tuple[Callable[[str], Any], ...] = (str, lambda text: [{"type": "text", "text": text}])
"""How a message holds a text: as a string, or as a list of parts where a template of a vision model demands it."""


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, rendered without ever touching what is already in the context.

    `chat_template` replaces the tokenizer's own Jinja text. `template_kwargs` are variables that the template reads at
    every render (`enable_thinking=False`, `date_string="26 Jul 2024"`). `eos_token_ids` are further tokens that end a
    response, such as the `eos_token_id` list of a model's generation config.

    Raises:
        ChatTemplateError: the tokenizer has no chat template and none is given.

    >>> from turnwise.testing.fakes import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> template = ChatTemplate(tokenizer)
    >>> sampled = [*tokenizer.encode("Right"), *template.stop_token_ids]
    >>> context = template.start([{"role": "user", "content": "Where to?"}]) + sampled
    >>> context += template.extend(sampled, [{"role": "user", "content": "And now?"}])
    >>> print(tokenizer.decode(context))
    <|im_start|>user
    Where to?<|im_end|>
    <|im_start|>assistant
    Right<|im_end|>
    <|im_start|>user
    And now?<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise ChatTemplateError(
                "this tokenizer has no chat template: save the model with one (tokenizer_config.json or chat_template.jinja), "
                "or give the template's text"
            )
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._template_kwargs = dict(template_kwargs or {})
        self._eos_token_ids = tuple(eos_token_ids)
        self._codec = TextCodec(tokenizer)
        self._starts, self._tails = RecentIds(), RecentIds()
        self._is_announced = False

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of the first prompt: the messages, and the header of the response that is to be sampled.

        Raises:
            ChatTemplateError: the template refuses the messages, or there are none.
        """
        if not messages:
            raise ChatTemplateError("a context can't start with no message: give at least a user's")
        self._check_parts(messages)
        return self._ids(self._starts, self._render, messages, tools)

    def extend(self, response_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids that follow a sampled response: what is missing to close its turn, the messages, the next response's header.

        A response that ends with the token by which the template ends the turn is closed already, and that token is not
        repeated. Any other response (cut by its budget, ended by another stop token or by a stop string) is closed with it.

        Raises:
            ChatTemplateError: the template refuses the messages after an assistant's, or drops the assistant's text.
        """
        self._check_parts(new_messages)
        tail = self._ids(self._tails, self._render_tail, new_messages, tools)
        end_of_turn = self._first_special(tail) if self._closing_ids else None
        if end_of_turn is None or len(response_ids) == 0 or response_ids[-1] != tail[end_of_turn]:
            return tail
        return tail[end_of_turn + 1 :]

    def respond(self, content: str) -> list[int]:
        """Ids of a response as the model would sample it in saying `content`, up to and including the end-of-turn token."""
        return [*self._codec.encode(self._lead_in + content), *self._closing_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, for parsing and reading. Encoding it again need not give the same ids."""
        return self._codec.decode(token_ids)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the template's end of turn, the tokenizer's end of text, those of the generation config."""
        eos = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([*self._closing_ids[-1:], *([] if eos is None else [eos]), *self._eos_token_ids]))

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether a fresh render of a conversation differs from the appended one (thinking stripped, system prompt moved).

        Found by rendering one with a system prompt, where the template takes one, and a response with thinking.
        """
        user, thought = _message("user", "a"), _message("assistant", f"<think>\nb\n</think>\n\n{_SENTINEL}")
        for first in ([_message("system", "c"), user], [user]):
            try:
                appended = self._render(first) + self._lead_in + thought["content"] + self._render_tail([user])
                return self._render([*first, thought, user]) != appended
            except ChatTemplateError:
                continue
        return False

    def announce_rewrites(self) -> None:
        """Says in the log, once, that contexts are appended to where the template would rewrite what is history."""
        if self._is_announced:
            return
        self._is_announced = True
        if self.rewrites_history:
            _logger.warning(
                "this chat template renders earlier turns differently once they are history (thinking stripped or a prompt "
                "moved). Contexts are appended to all the same and trained on as the server saw them."
            )

    @cached_property
    def _prefix(self) -> tuple[Message, Message]:
        """A user's message and the sentinel, in the form in which this template keeps the sentinel's text."""
        refusal = "it drops the text of assistant messages"
        for form in _TEXT_FORMS:
            user, sentinel = _message("user", form("a")), _message("assistant", form(_SENTINEL))
            try:
                if _SENTINEL in self._render([user, sentinel, user]):
                    return user, sentinel
            except ChatTemplateError as error:
                refusal = str(error)
        raise ChatTemplateError(
            f"a context can't be extended with this chat template ({refusal}): one that renders user → assistant → user and "
            "keeps each text is needed"
        )

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether lists of parts are read; a template for texts would print them as a Python list."""
        try:
            text = self._render([_message("user", _TEXT_FORMS[1](_SENTINEL))])
        except ChatTemplateError:
            return False
        return _SENTINEL in text and "'type'" not in text

    def _check_parts(self, messages: Sequence[Message]) -> None:
        if any(isinstance(message.get("content"), list) for message in messages) and not self._takes_parts:
            raise ChatTemplateError(
                "a message's content is a list of parts and this chat template knows texts only: send a string, or use the "
                "template of a model that takes images"
            )

    @cached_property
    def _closing_ids(self) -> list[int]:
        """What closes an assistant's turn, up to its end-of-turn token; empty where the template has no such token."""
        user = self._prefix[0]
        tail = self._codec.encode(self._render_tail([user]))
        end_of_turn = self._first_special(tail)
        return [] if end_of_turn is None else tail[: end_of_turn + 1]

    @cached_property
    def _lead_in(self) -> str:
        """White space that the template puts between a response's header and its text (Llama 2's blank)."""
        user, sentinel = self._prefix
        header = self._render([user])
        before = self._render([user, sentinel, user]).partition(_SENTINEL)[0]
        lead_in = before.removeprefix(header)
        return lead_in if lead_in.isspace() else ""

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset([*self.tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)])

    def _first_special(self, token_ids: Sequence[int]) -> int | None:
        return next((index for index, token_id in enumerate(token_ids) if token_id in self._special_ids), None)

    def _render_tail(self, new_messages: Sequence[Message], tools: Tools = ()) -> str:
        text = self._render([*self._prefix, *new_messages], tools)
        _, found, tail = text.partition(_SENTINEL)
        if not found:
            raise ChatTemplateError(
                "the chat template drops an assistant's text where it is followed by "
                f"{[message.get('role') for message in new_messages]}: a context can't be extended with these messages"
            )
        return tail

    def _render(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=self._chat_template,
                    add_generation_prompt=True,
                    tokenize=False,
                    **self._template_kwargs,
                )
            )
        except (TemplateError, TypeError) as error:
            roles = " → ".join(str(message.get("role")) for message in messages)
            raise ChatTemplateError(
                f"the chat template refuses the messages {roles}: {error}. Send the roles and contents that it knows, or give "
                "another chat template"
            ) from error

    def _ids(
        self, recent: RecentIds, render: Callable[[Sequence[Message], Tools], str], messages: Sequence[Message], tools: Tools
    ) -> list[int]:
        """The ids of what `render` makes of the messages, looked up in `recent` where they are texts alone."""
        key = None if tools else key_of(messages)
        found = None if key is None else recent.of(key)
        if found is not None:
            return found
        token_ids = self._codec.encode(render(messages, tools))
        if key is not None:
            recent.keep(key, token_ids)
        return token_ids


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}
