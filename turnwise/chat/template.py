"""An append-only chat template: encodes the first prompt, then the text between each sampled response and the
next one.

Sampled tokens are never decoded and encoded again. The text after them is what the template writes after a
*sentinel*, a made-up assistant message, in a short conversation. So the end-of-turn token, separators and
headers are exactly those of the template, and the cost of a turn doesn't grow with the history.
`docs/design/tokens.md` lists the traps."""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from turnwise.chat.codec import TextCodec
from turnwise.chat.foreign_text import ForeignText
from turnwise.chat.history import rewrites_answers, rewrites_tools
from turnwise.chat.message_content import Messages, continued, key_of, message_of
from turnwise.chat.rendering import SENTINEL, Renderer, Tools
from turnwise.chat.thinking_tags import behind_header, closed_by, opened_by, without_tags
from turnwise.chat.turn_ends import ASKED, BEFORE, TurnEnds, is_taught
from turnwise.errors import ChatTemplateError
from turnwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MAX_RECENT = 8192  # cached renderings


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, for contexts to which ids are only appended.

    `chat_template` replaces the tokenizer's own Jinja text. `template_kwargs` are variables that the template
    reads at every render (`enable_thinking=False`, `date_string="26 Jul 2024"`). `eos_token_ids` are
    additional tokens that end a response, such as the `eos_token_id` list of a model's generation config.
    Raises ChatTemplateError if there is no chat template, or the template never reads one of
    `template_kwargs`.

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
                "this tokenizer has no chat template: save the model with one (tokenizer_config.json or "
                "chat_template.jinja), or give the template's text"
            )
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, chat_template, template_kwargs or {})
        ends = dict.fromkeys([tokenizer.eos_token_id, *eos_token_ids])
        self._known_ends = tuple(end for end in ends if end is not None)
        self._codec = TextCodec(tokenizer)
        self._recent = lru_cache(_MAX_RECENT)(self._ids_of_key)
        self._foreign: ForeignText | None = None
        self._is_announced = False

    @cached_property
    def without_special_tokens(self) -> Self:
        """The same template, but special tokens in messages of users and tools are encoded as ordinary
        text."""
        return self._over(ForeignText(self._codec.added_tokens))

    @cached_property
    def of_clients(self) -> Self:
        """The same template, but special tokens in any message are encoded as ordinary text."""
        return self._over(ForeignText(self._codec.added_tokens, ("system", "user", "assistant", "tool")))

    def _over(self, foreign: ForeignText) -> Self:
        template = copy.copy(self)
        template._recent = lru_cache(_MAX_RECENT)(template._ids_of_key)
        template._foreign = foreign
        return template

    @property
    def opens_thinking(self) -> bool:
        """Whether the header before each response already opens its thinking, for example with `<think>`."""
        return opened_by(self._header) != ""

    def start(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Ids of the first prompt: the messages and the header of the next response. If the last message is
        an assistant's, the response continues it: its words stand behind the header, and its turn isn't
        ended. Raises ChatTemplateError if there are no messages, or the template refuses them or doesn't show
        them."""
        if not messages:
            raise ChatTemplateError("a context can't start with no message: give at least a user's")
        context, words = continued(messages)
        if words and not context:
            raise ChatTemplateError(
                "a context can't start with an assistant's words: put a user's message before them"
            )
        return [*self._ids((), context, tools), *self._continued(words)]

    def extend(self, response_ids: Sequence[int], new_messages: Messages, tools: Tools = ()) -> list[int]:
        """Ids that follow a sampled response: the missing end of its turn, the messages, and the next
        response's header. As in `start`, the words of a last message that is an assistant's are continued.

        If a response ends with the template's own end-of-turn token, that token isn't repeated. Any other
        response (cut by its budget, ended by another stop token or by a stop string) gets that token. Raises
        ChatTemplateError if the template refuses the messages after an assistant's, doesn't show them, or
        drops the assistant's text."""
        context, words = continued(new_messages)
        return [*self._tail(response_ids, context, tools), *self._continued(words)]

    def _tail(self, response_ids: Sequence[int], new_messages: Messages, tools: Tools) -> list[int]:
        ends = self._turns
        role = ""
        if new_messages:
            role = str(new_messages[0].get("role"))
        if role == "tool" and ends.results_need_call:
            return self._after_call(response_ids, new_messages, tools)
        tail = self._ids(ends.prefix, new_messages, tools)
        closing = ends.answers.closing
        if not closing or len(response_ids) == 0:
            return tail
        is_usual = tail[: len(closing)] == closing
        if not is_usual:
            # If a template ends a turn with the next role's token, another role's token stands here.
            closing = ends.closing_before(role)
            if not closing or tail[: len(closing)] != closing:
                return tail
        last = response_ids[-1]
        end = len(closing) - 1
        # The response has ended its turn. It may have used the token that ends the last answer of a
        # conversation, as fine-tuning teaches: the end in mid-conversation isn't written behind it.
        if last == tail[end] or (is_usual and last == ends.answers.final[-1]):
            return tail[end + 1 :]
        # The response has begun its end: only the rest of it is missing.
        if last in self._codec.added_tokens and last in tail[:end]:
            return tail[tail.index(last) + 1 :]
        return tail

    def respond(self, content: str) -> list[int]:
        """Ids of a response as the model would sample it to say `content`, with the end-of-turn token. Raises
        ChatTemplateError if the response's header opens thinking, and neither `content` nor the template ends
        it."""
        lead_in, words = self._after_header(content)
        if lead_in is None:
            opened = opened_by(self._header)
            raise ChatTemplateError(
                f"{self.renderer.label} opens an answer with {opened.strip()!r}, and the text "
                f"{content[:40]!r} doesn't close it: begin the assistant's text with its thinking and "
                "</think>, or turn thinking off by template_kwargs.enable_thinking=false where the template "
                "reads that"
            )
        token_ids = self._codec.encode(lead_in + words, context=self._header)
        return token_ids + self._turns.answers.final

    def _continued(self, words: str) -> list[int]:
        """Ids of the beginning of a response whose words the prompt gives."""
        if not words:
            return []
        lead_in, words = self._after_header(words)
        return self._codec.encode((lead_in or "") + words, context=self._header)

    def _after_header(self, content: str) -> tuple[str | None, str]:
        """The text between a response's header and its words, and the words without thinking tags that the
        header has written. The first is None if the header opens thinking, and neither the words nor the
        template end it."""
        lead_in = self._lead_in
        opened = opened_by(self._header)
        tag = opened.strip()
        if opened and content.lstrip().startswith(tag):
            space = opened[len(opened.rstrip()) :]
            return "", content.lstrip().removeprefix(tag).removeprefix(space)
        # Words with a thinking tag of their own replace the tags that the template would write.
        if "</think>" in content and not (lead_in or "").isspace():
            return "", content
        return lead_in, content

    def respond_with(self, message: Message) -> list[int]:
        """Ids of a response that is this assistant's message, with or without tool calls. Raises
        ChatTemplateError as `respond` and `respond_with_calls` do."""
        if message.get("tool_calls"):
            return self.respond_with_calls(message)
        return self.respond(message["content"])

    def respond_with_calls(self, message: Message) -> list[int]:
        """Ids of an assistant's message with `tool_calls` as the template writes it, with the end-of-turn
        token. Raises ChatTemplateError if the template doesn't show the calls, or doesn't write them right
        after a response's header."""
        self.renderer.shown((), [self._turns.user, message])
        header = self._header
        opened = opened_by(header).strip()
        content = message.get("content")
        closes_thinking = isinstance(content, str) and "</think>" in content
        forms = [message]
        if opened == "<think>" and closes_thinking and not str(content).startswith(opened):
            # Some templates read thinking in both tags only.
            forms.append({**message, "content": f"{opened}\n{content}"})
        for text in chain.from_iterable(map(self._turns.texts_with_calls, forms)):
            response = behind_header(text, header)
            if response is None or not is_taught(message, response):
                continue
            token_ids = self._codec.encode(response, context=header)
            # A stop token in the middle would end the response before its calls.
            if set(self.stop_token_ids).isdisjoint(token_ids[:-1]):
                return token_ids
        advice = "write them into the assistant's text, in the form that the model is to say"
        if opened and "</think>" not in str(content):
            advice = (
                f"the header opens {opened}, so begin the content with its thinking and </think>, or {advice}"
            )
        raise ChatTemplateError(
            f"{self.renderer.label} doesn't write tool calls at the beginning of a response, after all of "
            f"the message's content, with an end of their own: {advice}"
        )

    def written_call(self, message: Message) -> str:
        """All that the template writes behind a user's text for a message with tool calls, up to the end of
        the calls. Raises ChatTemplateError if the template doesn't show the calls."""
        messages = [self._turns.user, message]
        self.renderer.shown((), messages)
        for text in (*self._turns.texts_with_calls(message), self._turns.text(messages)):
            _, _, written = text.partition(ASKED)
            if is_taught(message, written):
                return written
        raise ChatTemplateError(f"{self.renderer.label} doesn't show tool calls behind a user's message")

    def decode(self, token_ids: Sequence[int], skips_turn_tokens: bool = True) -> str:
        """The text of the ids, by default without `turn_token_ids`, for rewards, parsing and reading. All
        other tokens stay, such as `<think>` or `<tool_call>`, special or not. Encoding the text may yield
        other ids."""
        if skips_turn_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.turn_token_ids]
        return self._codec.decode(token_ids, skips_special=False)

    @cached_property
    def turn_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that begin or end a turn in this template, and of the tokenizer's BOS, EOS and
        padding."""
        tokenizer = self.tokenizer
        special_ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        token_ids = self._turns.turn_token_ids.union(self.stop_token_ids, special_ids)
        return token_ids - {None}

    @property
    def turn_tokens(self) -> list[str]:
        """The texts of `turn_token_ids`."""
        added = self._codec.added_tokens
        return sorted(token for token_id, token in added.items() if token_id in self.turn_token_ids)

    def max_characters(self, num_tokens: int) -> int:
        """The maximum number of characters in `num_tokens` tokens."""
        return num_tokens * self._codec.longest_token

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the template's end of turn, the tokenizer's EOS, `eos_token_ids` and the
        template's end of tool calls. If the end of turn also ends a part of a response, such as thinking, it
        counts only if it is an EOS too, or no EOS is known."""
        turns = self._turns
        ends = list(self._known_ends)
        end = turns.answers.final[-1:]
        is_part = bool(end) and end[0] in turns.between_thought_and_answer
        if not is_part or not self._known_ends:
            ends = end + ends
        if turns.calls is not None:
            ends.append(turns.calls.token_id)
        return tuple(dict.fromkeys(ends))

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether rendering a whole conversation yields another text than appending to it: thinking is
        stripped, an empty think block is added to answers without thinking, or the system prompt is moved."""
        return rewrites_answers(self.renderer, self._turns, self._header, self._lead_in or "")

    @cached_property
    def rewrites_tool_history(self) -> bool:
        """`rewrites_history`, also tested on conversations with tools, calls and results: the list of tools
        may be moved."""
        return self.rewrites_history or rewrites_tools(self, self._turns)

    def announce_rewrites(self, has_tools: bool = False) -> None:
        """Warns, once, if the template `rewrites_history`, or with tools `rewrites_tool_history`."""
        if self._is_announced:
            return
        self._is_announced = True
        rewrites = self.rewrites_tool_history if has_tools else self.rewrites_history
        if rewrites:
            logger.warning(
                "this chat template renders earlier turns differently once they are history (thinking "
                "stripped, or a prompt or the list of tools moved). Contexts are appended to all the same "
                "and trained on as the server saw them."
            )

    def _after_call(self, response_ids: Sequence[int], results: Messages, tools: Tools) -> list[int]:
        """Ids that follow a response with tool calls: the missing end of the calls, the results, and the next
        header."""
        ends = self._turns
        tail = self._ids(ends.called(results[0]), results, tools)
        # What comes before the token that ends the calls belongs to the made-up call.
        if ends.calls is not None and ends.calls.token_id in tail:
            start = tail.index(ends.calls.token_id)
        else:
            start = ends.first_added(tail) or 0
        last = list(response_ids[-1:])
        ends_as_calls = last == [tail[start]]
        # The end of an answer ends the calls too, unless it is the token of the next role's header.
        ends_as_answer = last == ends.answers.final[-1:] and not ends.ends_with_next_role
        if last and (ends_as_calls or ends_as_answer):
            start += 1
        return tail[start:]

    @cached_property
    def _turns(self) -> TurnEnds:
        return TurnEnds(self.renderer, self._codec, self._known_ends)

    @cached_property
    def _header(self) -> str:
        return self.renderer.render([self._turns.user])

    @cached_property
    def _lead_in(self) -> str | None:
        """The text between a response's header and its content, such as a space, a channel, or the end of
        opened thinking. None if the header opens thinking and the template doesn't show how it ends."""
        header = self._header
        prefix = self._turns.prefix
        # As an earlier answer, then as the last one.
        rendered = (
            self.renderer.render([*prefix, self._turns.user]),
            self._turns.text(prefix),
        )
        texts = [text.partition(SENTINEL)[0] for text in rendered if SENTINEL in text]
        for text in texts:
            if text.startswith(header):
                return "" if closed_by(header) else text.removeprefix(header)
        # The template writes thinking tags of answers otherwise than those of the header.
        thinking = opened_by(header) or closed_by(header)
        base = header.removesuffix(thinking)
        tails = [text.removeprefix(base) for text in texts if text.startswith(base)]
        lead_ins = [tail.removeprefix(thinking.strip()).lstrip() for tail in tails]
        if opened_by(header):
            return next((text for text in lead_ins if "think" in text.lower()), None)
        if thinking and lead_ins:
            return without_tags(lead_ins[0])
        return ""

    def _ids(self, prefix: Messages, messages: Messages, tools: Tools) -> list[int]:
        """The ids of the rendered messages. Ids of plain text are cached, since a group's episodes show the
        same texts."""
        is_usual = not tools and (not prefix or prefix is self._turns.prefix)
        key = key_of(messages) if is_usual else None
        if key is None:
            return self._encoded(prefix, messages, tools)
        return list(self._recent(bool(prefix), key))

    def _ids_of_key(self, is_tail: bool, key: tuple[tuple[str, str], ...]) -> array[int]:
        """The ids of the messages that `key` describes, to be cached: an array takes a fifth of a list's
        memory."""
        prefix = self._turns.prefix if is_tail else ()
        messages = [message_of(role, text) for role, text in key]
        return array("q", self._encoded(prefix, messages, ()))

    def _encoded(self, prefix: Messages, messages: Messages, tools: Tools) -> list[int]:
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        if has_parts and not self.renderer.accepts_parts:
            raise ChatTemplateError(
                "a message's content is a list of parts and this chat template takes strings only: send a "
                "string, or use the template of a model that takes images"
            )
        mark = ""
        if self._foreign is not None:
            messages, mark = self._foreign.marked(messages)
        text = self.renderer.shown(prefix, messages, tools)
        # Cut inside special tokens that users or tools have spelt out, so that these stay ordinary text.
        pieces = self._foreign.pieces(text, mark) if self._foreign is not None else [text]
        token_ids: list[int] = []
        context = BEFORE if prefix else ""
        for piece in pieces:
            token_ids += self._codec.encode(piece, context)
            context = BEFORE
        return token_ids
