"""The base of parsers whose calls begin with a mark. Reading takes time in proportion to the length of the
text, whatever the text is: after `MAX_UNREADABLE` calls that can't be read, or two passes over the text,
nothing more is read."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from turnwise.chat.argument_types import ArgumentTypes
from turnwise.chat.call_json import Unreadable, skip_space
from turnwise.chat.rendering import Tools
from turnwise.protocols.tools import ParsedResponse, ToolCall

CallsAndEnd = tuple[Sequence[ToolCall | Unreadable], int]
"""Calls (or faults) that begin at a mark, and the position after them."""
MAX_UNREADABLE = 32
"""Maximum calls of one response that can't be read before reading stops. Each may cost a look at the whole
text."""
MAX_CALLS = 1000
"""Maximum calls of one response that are read."""
_MAX_PASSES = 2  # how often calls that aren't closed may make the parser read the text again
_MAX_SHOWN = 80  # maximum characters of an unreadable call that its error repeats


class MarkedCallParser(ABC):
    """Reads calls that begin with the mark `opening` and, if `closing` isn't empty, end with that mark. The
    rest is content."""

    opening: ClassVar[re.Pattern[str]]
    closing: ClassVar[str] = ""
    form: ClassVar[str]
    """A call as the model should write it, for error messages."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Marks that are removed from the content, such as the marks around a list of calls."""
    reads_turn_tokens: bool = False
    """Whether the tokens that begin and end turns mark calls too."""
    opens_thinking: bool = False
    """Whether the template's header opens the thinking of each response."""

    def parse(self, text: str, tools: Tools) -> ParsedResponse:
        """The calls in order, the thinking and other text around them, and a sentence for each call that
        can't be read.

        >>> from turnwise.chat.tool_calls import HermesParser
        >>> text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> HermesParser().parse(text, []).tool_calls
        (ToolCall(name='add', arguments={'a': 1}, id=''),)
        """
        thinking = self._thinking(text)
        body = text[len(thinking) :]
        content = [thinking]
        calls: list[ToolCall] = []
        errors: list[str] = []
        types = ArgumentTypes(tools)
        position = 0
        num_read_again = 0  # characters that were read as part of a call that isn't closed
        while mark := self.opening.search(body, position):
            content.append(body[position : mark.start()])
            problems: list[Unreadable] = []
            end = mark.end()
            try:
                read, end = self.read(body, mark, types)
                position = self._after_closing(body, end)
                calls += [call for call in read if isinstance(call, ToolCall)]
                problems = [problem for problem in read if isinstance(problem, Unreadable)]
            except Unreadable as fault:
                position = self._next(body, mark.end())
                problems = [fault]
                num_read_again += end - mark.end()
            if not problems and len(calls) < MAX_CALLS:
                continue
            unreadable = body[mark.start() : position]
            if problems:
                content.append(unreadable)
            shown = unreadable.strip()
            if len(shown) > _MAX_SHOWN:
                shown = f"{shown[:_MAX_SHOWN]}…"
            for problem in problems[: MAX_UNREADABLE - len(errors)]:
                errors.append(
                    f"this tool call can't be read, since {problem}: {shown} Write it as {self.form}"
                )
            if len(errors) == MAX_UNREADABLE or num_read_again > _MAX_PASSES * len(body):
                errors[-1] += (
                    f" After {len(errors)} calls that can't be read, nothing more of this response is read."
                )
                break
            if len(calls) >= MAX_CALLS:
                errors.append(f"more than {MAX_CALLS} tool calls in one response aren't read: write fewer")
                calls = calls[:MAX_CALLS]
                break
        content.append(body[position:])
        around = "".join(content)
        for mark_around in self.dropped:
            around = around.replace(mark_around, "")
        return ParsedResponse(around.strip(), tuple(calls), tuple(errors))

    def _thinking(self, text: str) -> str:
        """The thinking at the beginning of a response, with its end tag. If neither the response nor the
        template's header opens thinking, a `</think>` counts only before the first call."""
        is_opened = self.opens_thinking or text.lstrip().startswith("<think>")
        mark = self.opening.search(text)
        if mark is not None and not is_opened:
            text = text[: mark.start()]
        thinking, closing, _ = text.partition("</think>")
        if not is_opened and not closing:
            return ""
        return thinking + closing

    @abstractmethod
    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        """What follows an opening mark. Raises Unreadable if the form is wrong."""

    def _after_closing(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        if self.closing and not text.startswith(self.closing, end):
            raise Unreadable(f"it isn't closed by {self.closing}")
        return end + len(self.closing)

    def _next(self, text: str, position: int) -> int:
        """The position where reading continues after an unreadable call whose opening mark ends at
        `position`."""
        ends = [len(text)]
        closed = text.find(self.closing, position)
        if self.closing and closed >= 0:
            ends.append(closed + len(self.closing))
        mark = self.opening.search(text, position)
        if mark is not None:
            ends.append(mark.start())
        return min(ends)
