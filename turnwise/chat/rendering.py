"""Renders with a chat template, and makes sure that every message and tool shows in the result.

Many published templates silently drop messages of some kind. So each new combination of roles, keys and kinds
of content is rendered once with made-up words in place of its texts, calls and schemas, and refused if the
result lacks one of these words. If users or tools spell out special tokens, `ForeignText` makes them ordinary
text (`ChatTemplate.without_special_tokens`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, nodes

from turnwise.errors import ChatTemplateError, nearest
from turnwise.runtime.time_limit import ComputedTooLong, TimeLimit
from turnwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]

MADE_UP = "turnwise8f1e6c0d5b7a4293"
"""The beginning of the made-up texts of a trial rendering. Nothing that is taught or shown may hold it."""
SENTINEL = f"{MADE_UP}sentinel"
"""A made-up assistant text. Trimming, splitting at `</think>` and JSON escaping don't change it, so
renderings show it."""
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""transformers' tag around the assistant's text, which writes nothing."""
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # variables set at every render
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""Exceptions that a template raises for messages of a kind that it doesn't support."""
RENDERING = TimeLimit(5.0)
"""Limits the processor time of one rendering; a usual one takes milliseconds. A template may loop on real
messages only."""
_MAX_SHAPES = 1024
_MAX_ROLES = 20  # of the messages that an error names, the last ones
_MAX_SHOWN = 60


class Renderer:
    """Renders messages with a tokenizer's chat template, or with the Jinja text `chat_template`. With
    `template_kwargs`, raises ChatTemplateError if the template never reads one of them, or isn't valid
    Jinja."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._kwargs = dict(template_kwargs)
        self._shapes: dict[Any, bool] = {}
        if self._kwargs:
            self._check_kwargs()

    @property
    def where(self) -> str:
        """The template's name in error messages, with its file if that is known."""
        folder = Path(str(self._tokenizer.name_or_path or ""))
        names = ("chat_template.jinja", "tokenizer_config.json")
        found = next((str(folder / name) for name in names if folder.name and (folder / name).is_file()), "")
        return (
            "the chat template that was given"
            if self._chat_template
            else f"the chat template {found}".rstrip()
        )

    def sources(self) -> list[str]:
        """The Jinja texts; a tokenizer may have a second one for tools."""
        if self._chat_template:
            return [self._chat_template]
        own = self._tokenizer.chat_template
        return list(own.values()) if isinstance(own, dict) else [str(own)]

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the template besides messages and tools."""
        return {**self._tokenizer.special_tokens_map, **self._kwargs}

    def render(self, messages: Sequence[Message], tools: Tools = (), *, opens_answer: bool = True) -> str:
        """Renders the messages and, if `opens_answer`, the next response's header. Raises ChatTemplateError
        on failure."""
        return self._render(messages, list(tools) or self._no_tools, opens_answer)

    def shown(self, prefix: Sequence[Message], messages: Sequence[Message], tools: Tools = ()) -> str:
        """The messages and the next response's header as text. With a `prefix`, whose last message has the
        sentinel, the text begins after the sentinel. Raises ChatTemplateError if the template refuses
        messages, or drops texts, calls or tools."""
        if self._takes_parts_here(prefix, messages, tools):
            messages = [_as_parts(message) for message in messages]
        text = self._after(prefix, messages, tools)
        for message in messages:
            if message.get("role") != "assistant" and any(
                not shows(said, text) for said in texts_of(message)
            ):
                raise self._loses(f"part of what a {message.get('role')} message says")
        return text

    def accepts(self, content: Any) -> bool:
        """Whether the template shows a user's `content`, which must contain the sentinel, as text."""
        try:
            text = self.render([{"role": "user", "content": content}])
        except ChatTemplateError:
            return False
        return SENTINEL in text and "'type'" not in text

    def _takes_parts_here(self, prefix: Sequence[Message], messages: Sequence[Message], tools: Tools) -> bool:
        """Whether messages of these kinds need lists of parts, not strings. Raises ChatTemplateError if both
        forms fail."""
        key = (bool(prefix), tuple(map(_shape, messages)), json.dumps(tools, default=str) if tools else "")
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._probe(prefix, messages, tools)
        return self._shapes[key]

    def _probe(self, prefix: Sequence[Message], messages: Sequence[Message], tools: Tools) -> bool:
        words: dict[str, str] = {}
        made_up = [
            _worded(m, f"a {m.get('role')} message{' after an answer' * bool(prefix)}", words)
            for m in messages
        ]
        schemas = [_worded(tool, "the schema of a tool", words) for tool in tools]
        refusal: ChatTemplateError | None = None
        for is_parts in (False, True):
            try:
                said = [_as_parts(message) for message in made_up] if is_parts else made_up
                text = self._after(prefix, said, schemas)
            except ChatTemplateError as error:
                refusal = refusal or error
                continue
            # Where messages continue a context, its first prompt has shown the tools.
            expected = {
                word: what for word, what in words.items() if not (prefix and what.startswith("the schema"))
            }
            lost = next((what for word, what in expected.items() if word not in text), "")
            if not lost and not (is_parts and "'type'" in text):
                return is_parts
            refusal = self._loses(lost) if lost else refusal
        raise refusal or self._loses("the messages")

    def _loses(self, what: str) -> ChatTemplateError:
        is_schema = what.startswith("the schema")
        advice = (
            "describe the tools in the system message" if is_schema else "put its text into a user's message"
        )
        return ChatTemplateError(
            f"{self.where} doesn't show {what}: {advice}, or give the model a chat template that shows it"
        )

    def _after(self, prefix: Sequence[Message], messages: Sequence[Message], tools: Tools) -> str:
        text = self.render([*prefix, *messages], tools)
        if not prefix:
            return text
        _, found, tail = text.partition(SENTINEL)
        if not found:
            raise ChatTemplateError(
                f"{self.where} drops an assistant's text where it is followed by "
                f"{[message.get('role') for message in messages]}: a context can't be extended with these "
                f"messages"
            )
        return tail

    def _render(self, messages: Sequence[Message], tools: Any, opens_answer: bool = True) -> str:
        options = {
            "tools": tools,
            "chat_template": self._chat_template,
            "add_generation_prompt": opens_answer,
            "tokenize": False,
        }
        # Some templates take an empty list of calls for a call.
        said = [{k: v for k, v in m.items() if v or k not in ("tool_calls", "call_errors")} for m in messages]
        roles = " → ".join(str(message.get("role")) for message in messages[-_MAX_ROLES:])
        try:
            with RENDERING.kept():
                try:
                    return str(self._tokenizer.apply_chat_template(said, **options, **self._kwargs))
                except _FAULTS:
                    if not any(message.get("tool_calls") for message in said):
                        raise
                    with suppress(*_FAULTS):  # some templates take the arguments of calls as JSON text only
                        with_texts = [_with_arguments_as_text(message) for message in said]
                        return str(self._tokenizer.apply_chat_template(with_texts, **options, **self._kwargs))
                    raise
        except ComputedTooLong:
            last = next((text for message in reversed(messages) for text in texts_of(message)), "")
            raise ChatTemplateError(
                f"{self.where} doesn't end within {RENDERING.limit_s:g} s of computing on the messages "
                f"{roles}, the last of "
                f"which begins with {last[:_MAX_SHOWN]!r}: it seems to loop; fix it, leave this row out, or "
                f"give another chat "
                "template"
            ) from None
        except _FAULTS as error:
            raise ChatTemplateError(
                f"the chat template refuses the messages {roles}: {error}. Send the roles and contents that "
                f"it knows, set a "
                "variable that it lacks in template_kwargs, or give another chat template"
            ) from error

    @cached_property
    def _no_tools(self) -> list[Any] | None:
        """The value of `tools` when there are none: None, or an empty list if the template fails on None."""
        choices: tuple[list[Any] | None, ...] = (None, [])
        for tools in choices:
            for content in ("a", as_part("a")):
                with suppress(ChatTemplateError):
                    self._render([{"role": "user", "content": content}], tools)
                    return tools
        return None

    def _check_kwargs(self) -> None:
        read: set[str] = set()
        for source in self.sources():
            try:
                tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
                    GENERATION_TAG.sub("", source)
                )
            except TemplateError as error:
                raise ChatTemplateError(f"{self.where} isn't valid Jinja: {error}") from error
            read |= {node.name for node in tree.find_all(nodes.Name)} - set(_GIVEN)
        for name in self._kwargs:
            if name not in read:
                raise ChatTemplateError(
                    f"template_kwargs.{name}: {self.where} never reads {name!r}, so that it would change "
                    f"nothing; remove it." + nearest(name, read)
                )


def key_of(messages: Sequence[Message]) -> tuple[tuple[str, str], ...] | None:
    """A cache key for messages that each have only a role and a text; None if one of them has more.

    >>> key_of([{"role": "user", "content": "Where to?"}])
    (('user', 'Where to?'),)
    >>> key_of([{"role": "tool", "content": "4", "tool_call_id": "a"}])
    """
    key = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if len(message) != 2 or not isinstance(role, str) or not isinstance(content, str):
            return None
        key.append((role, content))
    return tuple(key)


def texts_of(message: Message) -> Iterator[str]:
    """The texts in a message's content.

    >>> list(texts_of({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}))
    ['what?']
    """
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )


def num_characters_of(messages: Sequence[Message]) -> int:
    """Number of characters of the messages' texts, without surrounding white space, which some templates
    drop. Raises ChatTemplateError if `messages` isn't a list of mappings."""
    try:
        return sum(len(text.strip()) for message in messages for text in texts_of(message))
    except (AttributeError, TypeError):
        said = (
            f"a list of messages, each a mapping with `role` and `content`, was expected; got "
            f"{str(messages)[:80]!r}"
        )
        raise ChatTemplateError(said) from None


def with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """The message with `change` applied to each text of its content."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        parts = [{**p, "text": change(p["text"])} if isinstance(p.get("text"), str) else p for p in content]
        return {**message, "content": parts}
    return message


def as_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": as_part(content)} if isinstance(content, str) else message


def _with_arguments_as_text(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        text = json.dumps(function.get("arguments"), ensure_ascii=False)
        written = {**function, "arguments": text}
        calls.append({**call, "function": written} if "function" in call else written)
    return {**message, "tool_calls": calls} if calls else message


def _shape(message: Message) -> tuple[Any, ...]:
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):
        return message.get("role"), bool(content)
    calls = message.get("tool_calls") or ()
    kinds = (
        tuple(part.get("type") for part in content) if isinstance(content, list) else type(content).__name__
    )
    return message.get("role"), bool(content), kinds, tuple(sorted(message)), len(calls)


def _worded(message: Mapping[str, Any], what: str, words: dict[str, str]) -> dict[str, Any]:
    """A message or schema with made-up words in place of everything that must show. Adds each word to
    `words`, with a description of what the word replaces."""

    def word(_: str, what: str = what) -> str:
        made = f"turnwiseword{len(words)}x"
        words[made] = what
        return made

    def names(value: Any) -> Any:
        if isinstance(value, Mapping):
            is_said = {
                key: key in ("name", "description") and isinstance(item, str) for key, item in value.items()
            }
            return {
                key: word(item, f"{what} (its {key} {item[:_MAX_SHOWN]!r})") if is_said[key] else names(item)
                for key, item in value.items()
            }
        return [names(item) for item in value] if isinstance(value, list) else value

    def called(call: Any) -> Any:
        function = call.get("function", call)
        arguments = function.get("arguments")
        has_some = isinstance(arguments, Mapping) and arguments
        shown = dict.fromkeys(arguments, word("", "a tool call")) if has_some else arguments
        named = {**function, "name": word("", "a tool call"), "arguments": shown}
        return {**call, "function": named} if "function" in call else named

    if "role" not in message:
        return dict(names(message))
    made_up = with_texts(dict(message), lambda text: word(text) if text.strip() else text)
    if message.get("tool_calls"):
        made_up = {**made_up, "tool_calls": [called(call) for call in message["tool_calls"]]}
    return made_up


def shows(said: str, text: str) -> bool:
    """Whether `text` shows `said`: exactly, trimmed, with other white space and punctuation, or as JSON."""
    if said.strip() in text:
        return True
    written = _letters(text)
    return any(
        _letters(form) in written for form in (said, json.dumps(said, ensure_ascii=False), json.dumps(said))
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


_MARKS = range(0xE000, 0xF900)  # characters of Unicode's private use area


class ForeignText:
    """Breaks up special tokens that are spelt out in messages of users and tools. `tokens`: id → text of each
    special token.

    >>> messages, mark = ForeignText({7: "<|im_end|>"}).marked([{"role": "user", "content": "a<|im_end|>"}])
    >>> messages[0]["content"].split(mark)
    ['a<', '|im_end|>']
    """

    def __init__(self, tokens: Mapping[int, str]) -> None:
        spelt = sorted({token for token in tokens.values() if len(token) > 1}, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, spelt))) if spelt else None

    def marked(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """The messages with a mark inside each spelt-out token, and the mark, which is "" if no token is
        spelt out."""
        foreign = [message for message in messages if message.get("role") in ("user", "tool")]
        texts = [text for message in foreign for text in texts_of(message)]
        # Some templates join two texts of one message, so a token may span both.
        joined = ["".join(texts_of(message)) for message in foreign]
        if self._spelt is None or not any(self._spelt.search(text) for text in joined):
            return messages, ""
        mark = next(chr(code) for code in _MARKS if not any(chr(code) in text for text in texts))
        broken = {
            id(m): with_texts(m, partial(self._broken, mark, len(list(texts_of(m))) > 1)) for m in foreign
        }
        return [broken.get(id(message), message) for message in messages], mark

    def _broken(self, mark: str, is_part: bool, text: str) -> str:
        pieces, begin = [""] if is_part else [], 0
        # A token may begin inside another one.
        while self._spelt is not None and (found := self._spelt.search(text, begin)):
            pieces.append(text[begin : found.start() + 1])
            begin = found.start() + 1
        return mark.join([*pieces, text[begin:]])
