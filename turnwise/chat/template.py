"""An append-only chat template: encodes the first prompt, then the text between each sampled response and the next one.

Sampled tokens are never decoded and encoded again. The text after them is what the template writes after a *sentinel*, a
made-up assistant message, in a short conversation. So the end-of-turn token, separators and headers are exactly those of the
template, and the cost of a turn doesn't grow with the history. `docs/design/tokens.md` lists the traps."""

from __future__ import annotations

import copy
import logging
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from turnwise.chat.codec import TextCodec
from turnwise.chat.rendering import SENTINEL, ForeignText, Renderer, Tools, as_part, key_of
from turnwise.errors import ChatTemplateError
from turnwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TEXT_FORMS: tuple[Callable[[str], Any], ...] = (str, as_part)
"""The forms that a message's text may need: a string, or a list of parts (for templates of vision models)."""
_OPENED_THINKING = re.compile(r"<(?!/|\W*end)[^<>]*think[^<>/]*>\s*\Z", re.IGNORECASE)
_CLOSED_THINKING = re.compile(r"<(?!/|\W*end)[^<>]*think[^<>/]*>\s*<(?=/|\W*end)[^<>]*think[^<>/]*>\s*\Z", re.IGNORECASE)
_THINKING_TAGS = re.compile(r"\A(?:\s*<[^<>]*think[^<>]*>)+\s*", re.IGNORECASE)
_THOUGHT = "turnwise8f1e6c0d5b7a4293thought"
_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys in which published templates look for an assistant's thinking."""
_MOST_RECENT = 8192  # maximum number of cached renderings
_BEFORE = "\n"  # stands for sampled text before an encoded text; no vocabulary merges it with what follows


class _Ends(NamedTuple):
    """The end of an assistant's turn in a template."""

    closing: list[int]
    """The ids that follow an answer before another message, up to the token that ends the turn; empty without such a token."""
    said: list[int]
    """The ids that follow the last answer of a conversation, up to the token that ends the turn. Fine-tuning teaches these."""


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, for contexts to which ids are only appended.

    `chat_template` replaces the tokenizer's own Jinja text. `template_kwargs` are variables that the template reads at every
    render (`enable_thinking=False`, `date_string="26 Jul 2024"`). `eos_token_ids` are additional tokens that end a response,
    such as the `eos_token_id` list of a model's generation config. Raises ChatTemplateError if there is no chat template, or
    the template never reads one of `template_kwargs`.

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
        self.renderer = Renderer(tokenizer, chat_template, template_kwargs or {})
        eos = tokenizer.eos_token_id
        self._known_ends = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self._codec = TextCodec(tokenizer)
        self._recent = lru_cache(_MOST_RECENT)(self._ids_of_key)
        self._foreign: ForeignText | None = None
        self._is_announced = False

    @cached_property
    def without_special_tokens(self) -> Self:
        """The same template, but special tokens in messages of users and tools are encoded as ordinary text."""
        template = copy.copy(self)
        template._recent = lru_cache(_MOST_RECENT)(template._ids_of_key)
        template._foreign = ForeignText(self._codec.added_tokens)
        return template

    @property
    def opens_thinking(self) -> bool:
        """Whether the header before each response already opens its thinking, for example with `<think>`."""
        return _opened(self._header) != ""

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of the first prompt: the messages and the header of the next response. Raises ChatTemplateError if there are no
        messages, or the template refuses them or doesn't show them."""
        if not messages:
            raise ChatTemplateError("a context can't start with no message: give at least a user's")
        return self._ids((), messages, tools)

    def extend(self, response_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids that follow a sampled response: the missing end of its turn, the messages, and the next response's header.

        If a response ends with the template's own end-of-turn token, that token isn't repeated. Any other response (cut by its
        budget, ended by another stop token or by a stop string) gets that token. Raises ChatTemplateError if the template
        refuses the messages after an assistant's, doesn't show them, or drops the assistant's text."""
        prefix = self._prefix
        if new_messages and new_messages[0].get("role") == "tool" and self._results_need_call:
            prefix = self._called(new_messages[0])
        tail = self._ids(prefix, new_messages, tools)
        if prefix is not self._prefix:
            # The tokens before the one that ends the turn belong to the made-up call.
            enders = (index for index, token_id in enumerate(tail) if token_id in self.stop_token_ids)
            tail = tail[next(enders, self._first_added(tail) or 0) :]
        ends = self._ends
        if not ends.closing or len(response_ids) == 0:
            return tail
        num_closing = len(ends.closing)
        is_usual = tail[:num_closing] == ends.closing
        # If a template ends a turn with the next role's token, another role's token may stand here.
        end = num_closing - 1 if is_usual else self._first_added(tail)
        last = response_ids[-1]
        if end is None:
            return tail
        if last == tail[end] or (is_usual and last == ends.said[-1]):
            return tail[end + 1 :]
        is_begun = last in self._codec.added_tokens and last in tail[:end]
        return tail[tail.index(last) + 1 :] if is_begun else tail

    def respond(self, content: str) -> list[int]:
        """Ids of a response as the model would sample it to say `content`, with the end-of-turn token. Raises ChatTemplateError
        if the response's header opens thinking, and neither `content` nor the template ends it."""
        lead_in, opened = self._lead_in, _opened(self._header)
        if opened and content.lstrip().startswith(opened.strip()):
            content = content.lstrip().removeprefix(opened.strip()).removeprefix(opened[len(opened.rstrip()) :])
            lead_in = ""
        elif "</think>" in content and not (lead_in or "").isspace():
            lead_in = ""
        elif lead_in is None:
            raise ChatTemplateError(
                f"{self.renderer.where} opens an answer with {opened.strip()!r}, and the text {content[:40]!r} doesn't close "
                "it: begin the assistant's text with its thinking and </think>, or turn thinking off by "
                "template_kwargs.enable_thinking=false where the template reads that"
            )
        return [*self._codec.encode(lead_in + content, after=self._header), *self._ends.said]

    def respond_with_calls(self, message: Message) -> list[int]:
        """Ids of an assistant's message with `tool_calls` as the template writes it, with the end-of-turn token. Raises
        ChatTemplateError if the template doesn't show the calls, or doesn't write them right after a response's header."""
        user, header, said = self._prefix[0], self._header, self._ends.said
        self.renderer.shown((), [user, message])
        # Some templates add empty thinking to the last message of a conversation; others refuse a user's message after a call.
        for text in (self._text([user, message, user], is_last=False), self._text([user, message])):
            token_ids = self._codec.encode(text.removeprefix(header), after=header)
            ends = [end for end in range(len(said), len(token_ids) + 1) if token_ids[end - len(said) : end] == said]
            if said and ends and text.startswith(header):
                return token_ids[: ends[0]]
        raise ChatTemplateError(
            f"{self.renderer.where} doesn't write tool calls at the beginning of a response: write them into the assistant's "
            "text, in the form that the model is to say"
        )

    def decode(self, token_ids: Sequence[int], skips_special: bool = True) -> str:
        """The text of the ids, by default without special tokens, for parsing and reading. Encoding it may yield other ids."""
        return self._codec.decode(token_ids, skips_special)

    def max_characters(self, num_tokens: int) -> int:
        """The maximum number of characters in `num_tokens` tokens: no token is longer than the vocabulary's longest entry."""
        return num_tokens * self._codec.longest_token

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the template's end of turn, the tokenizer's EOS and `eos_token_ids`. If the template's end
        of turn also ends a part of a response, such as thinking, it counts only if it is an EOS too, or no EOS is known."""
        end = self._ends.said[-1:]
        is_part = bool(end) and end[0] in self._between_thought_and_answer
        return tuple(dict.fromkeys([*([] if is_part and self._known_ends else end), *self._known_ends]))

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether rendering a whole conversation yields another text than appending to it: thinking is stripped, an empty think
        block is added to answers without thinking, or the system prompt is moved. Tested on made-up conversations."""
        user, sentinel = self._prefix
        form = _TEXT_FORMS[isinstance(user["content"], list)]
        thinking = dict.fromkeys(_THINKING_KEYS, _THOUGHT)
        thought = f"<think>\nb\n</think>\n\n{SENTINEL}"
        for first in ([_message("system", form("c")), user], [user]):
            try:
                has_thought = [_THOUGHT in self._text([*first, sentinel | thinking, *more], not more) for more in ((), (user,))]
                plain = thought if _opened(self._header) else SENTINEL
                return has_thought == [True, False] or any(self._rewrites(first, said, form) for said in (thought, plain))
            except ChatTemplateError:
                continue
        return False

    def announce_rewrites(self) -> None:
        """Warns, once, if the template `rewrites_history`."""
        if self._is_announced:
            return
        self._is_announced = True
        if self.rewrites_history:
            logger.warning(
                "this chat template renders earlier turns differently once they are history (thinking stripped or a prompt "
                "moved). Contexts are appended to all the same and trained on as the server saw them."
            )

    def _rewrites(self, first: Sequence[Message], said: str, form: Callable[[str], Any]) -> bool:
        user = self._prefix[0]
        opened, lead_in = _opened(self._header), self._lead_in or ""
        sampled = said.removeprefix(opened) if opened else ("" if "think" in lead_in.lower() else lead_in) + said
        tail = self.renderer.shown(self._prefix, [user])
        appended = self.renderer.render(first) + sampled + tail
        return self.renderer.render([*first, _message("assistant", form(said)), user]) != appended

    @cached_property
    def _prefix(self) -> tuple[Message, Message]:
        """A user's message and the sentinel as its answer, in the form (strings or lists of parts) that the template shows.
        Raises ChatTemplateError if it shows neither form."""
        refusal = "it drops the text of assistant messages"
        for form in _TEXT_FORMS:
            user, sentinel = _message("user", form("a")), _message("assistant", form(SENTINEL))
            try:
                if SENTINEL in self.renderer.render([user, sentinel, user]) and self.renderer.accepts(form(SENTINEL)):
                    return user, sentinel
            except ChatTemplateError as error:
                refusal = str(error)
        raise ChatTemplateError(
            f"a context can't be extended with this chat template ({refusal}): one that renders user → assistant → user and "
            "keeps each text is needed"
        )

    def _called(self, result: Message) -> tuple[Message, Message]:
        """`_prefix` with a made-up call, which holds the sentinel: some templates show a tool's result only after a call."""
        function = {"name": result.get("name") or "error", "arguments": {"a": SENTINEL}}
        call = {"id": result.get("tool_call_id", "call00000"), "type": "function", "function": function}
        return self._prefix[0], {"role": "assistant", "content": "", "tool_calls": [call]}

    @cached_property
    def _results_need_call(self) -> bool:
        """Whether the template shows a tool's result only after a call."""
        result = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": _THOUGHT}
        texts = [self._text([*prefix, result], is_last=False) for prefix in (self._prefix, self._called(result))]
        return [_THOUGHT in text.partition(SENTINEL)[2] for text in texts] == [False, True]

    @cached_property
    def _accepts_parts(self) -> bool:
        """Whether the template reads lists of parts; a template for texts would print them as a Python list."""
        return self.renderer.accepts(as_part(SENTINEL))

    @cached_property
    def _header(self) -> str:
        return self.renderer.render(self._prefix[:1])

    @cached_property
    def _ends(self) -> _Ends:
        """How answers end. If the ids after an answer in mid-conversation and those after the last answer agree up to a special
        token (an EOS token if possible), both ends are these ids. Otherwise each end goes up to its own first special token."""
        tail = self._codec.encode(self.renderer.shown(self._prefix, [self._prefix[0]]), after=_BEFORE)
        last = self._codec.encode(self._text(self._prefix).partition(SENTINEL)[2], after=_BEFORE)
        common = [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(tail, last, strict=False))]
        added = [index for index, token_id in enumerate(common) if token_id in self._codec.added_tokens]
        known = [index for index in added if common[index] in self._known_ends]
        ends = [index for index in added if common[index] not in self._between_thought_and_answer]
        if added:
            both = common[: (known or ends or added)[0] + 1]
            return _Ends(both, both)
        first, first_of_last = self._first_added(tail), self._first_added(last)
        closing = [] if first is None else tail[: first + 1]
        return _Ends(closing, closing if first_of_last is None else last[: first_of_last + 1])

    @cached_property
    def _between_thought_and_answer(self) -> list[int]:
        user, sentinel = self._prefix
        before = self._text([user, sentinel | dict.fromkeys(_THINKING_KEYS, _THOUGHT)]).partition(SENTINEL)[0]
        return self._codec.encode(before.partition(_THOUGHT)[2])

    @cached_property
    def _lead_in(self) -> str | None:
        """The text between a response's header and its content, such as a space, a channel, or the end of opened thinking. None
        if the header opens thinking and the template doesn't show how it ends."""
        header = self._header
        rendered = (self.renderer.render([*self._prefix, self._prefix[0]]), self._text(self._prefix))
        led = [text.partition(SENTINEL)[0] for text in rendered if SENTINEL in text]
        if exact := [text.removeprefix(header) for text in led if text.startswith(header)]:
            return "" if _closed(header) else exact[0]
        thinking = _opened(header) or _closed(header)
        base = header.removesuffix(thinking)
        after = [text.removeprefix(base).removeprefix(thinking.strip()).lstrip() for text in led if text.startswith(base)]
        if not _opened(header):
            return _THINKING_TAGS.sub("", after[0]) if thinking and after else ""
        return next((text for text in after if "think" in text.lower()), None)

    def _text(self, messages: Sequence[Message], is_last: bool = True) -> str:
        """The rendered messages, without a header for another response if `is_last`; "" if the template refuses them."""
        try:
            return self.renderer.render(messages, opens_answer=not is_last)
        except ChatTemplateError:
            return ""

    def _first_added(self, token_ids: Sequence[int]) -> int | None:
        added = self._codec.added_tokens
        return next((index for index, token_id in enumerate(token_ids) if token_id in added), None)

    def _ids(self, prefix: Sequence[Message], messages: Sequence[Message], tools: Tools) -> list[int]:
        """The ids of the rendered messages. Ids of plain text are cached, since a group's episodes show the same texts."""
        key = key_of(messages) if not tools and (not prefix or prefix is self._prefix) else None
        return self._encoded(prefix, messages, tools) if key is None else list(self._recent(bool(prefix), key))

    def _ids_of_key(self, is_tail: bool, key: tuple[tuple[str, str], ...]) -> array[int]:
        """The ids of the messages that `key` describes, to be cached: an array takes a fifth of a list's memory."""
        return array("q", self._encoded(self._prefix if is_tail else (), [_message(*said) for said in key], ()))

    def _encoded(self, prefix: Sequence[Message], messages: Sequence[Message], tools: Tools) -> list[int]:
        if any(isinstance(message.get("content"), list) for message in messages) and not self._accepts_parts:
            raise ChatTemplateError(
                "a message's content is a list of parts and this chat template takes strings only: send a string, or use the "
                "template of a model that takes images"
            )
        mark = ""
        if self._foreign is not None:
            messages, mark = self._foreign.marked(messages)
        text = self.renderer.shown(prefix, messages, tools)
        token_ids: list[int] = []
        after = _BEFORE if prefix else ""
        # Cut inside special tokens that users or tools have spelt out, so that these stay ordinary text.
        for piece in text.split(mark) if mark else [text]:
            token_ids += self._codec.encode(piece, after)
            after = _BEFORE
        return token_ids


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _opened(header: str) -> str:
    """The tag with which a response's header opens thinking, with the white space after the tag; "" if it opens none."""
    found = _OPENED_THINKING.search(header)
    return found.group() if found else ""


def _closed(header: str) -> str:
    """The empty thinking with which a response's header turns thinking off; "" if it has none."""
    found = _CLOSED_THINKING.search(header)
    return found.group() if found else ""
