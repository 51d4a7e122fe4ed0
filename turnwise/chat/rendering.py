"""Renders with a chat template, and makes sure that every message and tool shows in the result.

Many published templates silently drop messages of some kind. So each new combination of roles, keys and kinds
of content is rendered once with made-up words in place of its texts, calls and schemas, and refused if the
result lacks one of these words. If users or tools spell out special tokens, `foreign_text.ForeignText` makes
them ordinary text (`ChatTemplate.without_special_tokens`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, nodes

from turnwise.chat.message_content import Messages, as_part, as_parts, texts_of, with_texts
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
_SCHEMA = "the schema of a tool"
_CALL = "a tool call"


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
    def label(self) -> str:
        """The template's name in error messages, with its file if that is known."""
        if self._chat_template:
            return "the chat template that was given"
        folder = Path(str(self._tokenizer.name_or_path or ""))
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            if folder.name and (folder / name).is_file():
                return f"the chat template {folder / name}"
        return "the chat template"

    def sources(self) -> list[str]:
        """The Jinja texts; a tokenizer may have a second one for tools."""
        source = self._chat_template or self._tokenizer.chat_template
        if isinstance(source, dict):
            return list(source.values())
        return [str(source)]

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the template besides messages and tools."""
        return {**self._tokenizer.special_tokens_map, **self._kwargs}

    def render(self, messages: Messages, tools: Tools = (), *, opens_answer: bool = True) -> str:
        """Renders the messages and, if `opens_answer`, the next response's header. Raises ChatTemplateError
        on failure."""
        return self._render(messages, list(tools) or self._no_tools, opens_answer)

    def shown(self, prefix: Messages, messages: Messages, tools: Tools = ()) -> str:
        """The messages and the next response's header as text. With a `prefix`, whose last message has the
        sentinel, the text begins after the sentinel. Raises ChatTemplateError if the template refuses
        messages, or drops texts, calls or tools."""
        if self._takes_parts_here(prefix, messages, tools):
            messages = list(map(as_parts, messages))
        rendered = self._after(prefix, messages, tools)
        for message in messages:
            role = message.get("role")
            if role != "assistant" and not all(shows(text, rendered) for text in texts_of(message)):
                raise self._loses(f"part of what a {role} message says")
        return rendered

    @cached_property
    def accepts_parts(self) -> bool:
        """Whether the template reads lists of parts; a template for texts would print them as a Python
        list."""
        return self.accepts(as_part(SENTINEL))

    def accepts(self, content: Any) -> bool:
        """Whether the template shows a user's `content`, which must contain the sentinel, as text."""
        try:
            text = self.render([{"role": "user", "content": content}])
        except ChatTemplateError:
            return False
        return SENTINEL in text and "'type'" not in text

    def _takes_parts_here(self, prefix: Messages, messages: Messages, tools: Tools) -> bool:
        """Whether messages of these kinds need lists of parts, not strings. Raises ChatTemplateError if both
        forms fail."""
        shapes = tuple(map(_shape, messages))
        schemas = json.dumps(tools, default=str) if tools else ""
        key = (bool(prefix), shapes, schemas)
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._probe(prefix, messages, tools)
        return self._shapes[key]

    def _probe(self, prefix: Messages, messages: Messages, tools: Tools) -> bool:
        made_up = _MadeUpWords()
        place = " after an answer" if prefix else ""
        texts = [made_up.message(message, place) for message in messages]
        parts = list(map(as_parts, texts))
        schemas = [dict(made_up.schema(tool, _SCHEMA)) for tool in tools]
        refusal: ChatTemplateError | None = None
        for is_parts, form in ((False, texts), (True, parts)):
            try:
                text = self._after(prefix, form, schemas)
            except ChatTemplateError as error:
                refusal = refusal or error
                continue
            # Where messages continue a context, its first prompt has shown the tools.
            lost = [label for word, label in made_up.words.items() if word not in text]
            if prefix:
                lost = [label for label in lost if not label.startswith(_SCHEMA)]
            # A template for strings prints a list of parts as Python does.
            if not lost and not (is_parts and "'type'" in text):
                return is_parts
            if lost:
                refusal = self._loses(lost[0])
        raise refusal or self._loses("the messages")

    def _loses(self, label: str) -> ChatTemplateError:
        advice = "put its text into a user's message"
        if label.startswith(_SCHEMA):
            advice = "describe the tools in the system message"
        return ChatTemplateError(
            f"{self.label} doesn't show {label}: {advice}, or give the model a chat template that shows it"
        )

    def _after(self, prefix: Messages, messages: Messages, tools: Tools) -> str:
        text = self.render([*prefix, *messages], tools)
        if not prefix:
            return text
        _, sentinel, tail = text.partition(SENTINEL)
        if not sentinel:
            roles = [message.get("role") for message in messages]
            raise ChatTemplateError(
                f"{self.label} drops an assistant's text where it is followed by {roles}: a context can't "
                "be extended with these messages"
            )
        return tail

    def _render(self, messages: Messages, tools: Any, opens_answer: bool = True) -> str:
        options = {
            "tools": tools,
            "chat_template": self._chat_template,
            "add_generation_prompt": opens_answer,
            "tokenize": False,
        }
        without_empty_calls = list(map(_without_empty_calls, messages))
        named_roles = [str(message.get("role")) for message in messages[-_MAX_ROLES:]]
        roles = " → ".join(named_roles)
        try:
            with RENDERING.kept():
                apply = partial(self._tokenizer.apply_chat_template, **options, **self._kwargs)
                return _rendered(apply, without_empty_calls)
        except ComputedTooLong:
            texts = chain.from_iterable(map(texts_of, reversed(messages)))
            last = next(texts, "")
            raise ChatTemplateError(
                f"{self.label} doesn't end within {RENDERING.limit_s:g} s of computing on the messages "
                f"{roles}, the last of which begins with {last[:_MAX_SHOWN]!r}: it seems to loop; fix it, "
                "remove this row, or give another chat template"
            ) from None
        except _FAULTS as error:
            raise ChatTemplateError(
                f"the chat template refuses the messages {roles}: {error}. Send the roles and contents that "
                "it knows, set a variable that it lacks in template_kwargs, or give another chat template"
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
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        variables: set[str] = set()
        for source in self.sources():
            try:
                tree = environment.parse(GENERATION_TAG.sub("", source))
            except TemplateError as error:
                raise ChatTemplateError(f"{self.label} isn't valid Jinja: {error}") from error
            variables.update(node.name for node in tree.find_all(nodes.Name))
        variables.difference_update(_GIVEN)
        for name in self._kwargs:
            if name not in variables:
                raise ChatTemplateError(
                    f"template_kwargs.{name}: {self.label} never reads {name!r}, so that it would change "
                    f"nothing; remove it.{nearest(name, variables)}"
                )


def _rendered(apply: Callable[[list[Message]], Any], messages: list[Message]) -> str:
    try:
        return str(apply(messages))
    except _FAULTS:
        if not any(message.get("tool_calls") for message in messages):
            raise
        with suppress(*_FAULTS):  # some templates take the arguments of calls as JSON text only
            return str(apply(list(map(_with_arguments_as_text, messages))))
        raise


def _without_empty_calls(message: Message) -> Message:
    """The message without an empty list of calls, which some templates take for a call."""
    lists = ("tool_calls", "call_errors")
    return {key: value for key, value in message.items() if value or key not in lists}


def _with_arguments_as_text(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        text = json.dumps(function.get("arguments"), ensure_ascii=False)
        calls.append(_with_function(call, {**function, "arguments": text}))
    if not calls:
        return message
    return {**message, "tool_calls": calls}


def _with_function(call: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call with another name or other arguments. A call may be the function itself."""
    if "function" not in call:
        return function
    return {**call, "function": function}


def _shape(message: Message) -> tuple[Any, ...]:
    role = message.get("role")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):
        return role, bool(content)
    kinds: Any = type(content).__name__
    if isinstance(content, list):
        kinds = tuple(part.get("type") for part in content)
    calls = message.get("tool_calls") or ()
    return role, bool(content), kinds, tuple(sorted(message)), len(calls)


class _MadeUpWords:
    """Puts made-up words in place of everything in messages and schemas that must show. `words`: each word →
    what it replaces."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def message(self, message: Message, place: str) -> Message:
        label = f"a {message.get('role')} message{place}"

        def replaced(text: str) -> str:
            if not text.strip():
                return text
            return self._word(label)

        made_up = with_texts(dict(message), replaced)
        calls = message.get("tool_calls")
        if calls:
            made_up = {**made_up, "tool_calls": list(map(self._call, calls))}
        return made_up

    def schema(self, schema: Any, label: str) -> Any:
        if isinstance(schema, list):
            return [self.schema(item, label) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        made_up: dict[str, Any] = {}
        for key, item in schema.items():
            if key in ("name", "description") and isinstance(item, str):
                made_up[key] = self._word(f"{label} (its {key} {item[:_MAX_SHOWN]!r})")
            else:
                made_up[key] = self.schema(item, label)
        return made_up

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping) and arguments:
            arguments = dict.fromkeys(arguments, self._word(_CALL))
        made_up = {**function, "name": self._word(_CALL), "arguments": arguments}
        return _with_function(call, made_up)

    def _word(self, label: str) -> str:
        word = f"turnwiseword{len(self.words)}x"
        self.words[word] = label
        return word


def shows(text: str, rendered: str) -> bool:
    """Whether `rendered` shows `text`: exactly, trimmed, with other white space and punctuation, or as
    JSON."""
    if text.strip() in rendered:
        return True
    letters = _letters(rendered)
    forms = (text, json.dumps(text, ensure_ascii=False), json.dumps(text))
    return any(_letters(form) in letters for form in forms)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))
