"""Reads tool calls from sampled text, in seven forms that families of models use in their chat templates and model cards. A
call that can't be read becomes a sentence for the model. `tools.session` checks whether the tool is known and the arguments
fit its schema. Thinking is skipped: text before `</think>` holds no calls."""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.entry_points import load_class
from turnwise.errors import ConfigError
from turnwise.runtime.foreign import Foreign
from turnwise.spec import TOOL_PARSERS
from turnwise.tool_protocols import ParsedResponse, ToolCall, ToolCallParser

_MAX_SHOWN = 80  # maximum characters of an unreadable call that its error repeats
_MAX_DEPTH = 8  # how deeply a parameter's schema is looked into


class _Unreadable(Exception):
    """A call can't be read. The message says why."""


def _no_number(name: str) -> Any:
    raise _Unreadable(f"{name} isn't a JSON number")


_JSON = json.JSONDecoder(strict=False, parse_constant=_no_number)


def find_parser(name: str | None, template: ChatTemplate) -> ToolCallParser:
    """The parser `name`: a registered name or `module:Class`. None chooses the parser by the form of calls that the template
    writes. Raises ConfigError if there is no such parser, or the template writes none of the known forms; EnvironmentFault if
    a user's class can't be instantiated."""
    source = "\n".join(template.renderer.sources())
    found = name or next((form for form, (_, sign) in TOOL_PARSERS.items() if sign and sign in source), None)
    if found is None:
        raise ConfigError(
            f"agent.tool_parser: {template.renderer.where} writes tool calls in none of the known forms; name the one that the "
            f"model was taught: {', '.join(TOOL_PARSERS)}, or your own as module:Class"
        )
    entry, _ = TOOL_PARSERS.get(found, (found, ""))
    with Foreign(f"agent.tool_parser {found}: making it", "at the start", are_faults=True):
        parser: ToolCallParser = load_class(entry, "agent.tool_parser", ConfigError)()
    if not isinstance(parser, ToolCallParser):
        raise ConfigError(f"agent.tool_parser: {found} has no method `parse`; see ToolCallParser in turnwise/tool_protocols.py")
    if isinstance(parser, MarkedCallParser):
        parser.opens_thinking = template.opens_thinking
    return parser


class MarkedCallParser(ABC):
    """Reads calls that begin with the mark `opening` and, if `closing` isn't empty, end with that mark. The rest is content."""

    opening: ClassVar[re.Pattern[str]]
    closing: ClassVar[str] = ""
    form: ClassVar[str]
    """A call as the model should write it, for error messages."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Marks that are removed from the content, such as the marks around a list of calls."""
    opens_thinking: bool = False
    """Whether the template's header opens the thinking of each response."""

    def parse(self, text: str, tools: Tools) -> ParsedResponse:
        """The calls in order, the thinking and other text around them, and a sentence for each call that can't be read.

        >>> HermesParser().parse('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', []).tool_calls
        (ToolCall(name='add', arguments={'a': 1}, id=''),)
        """
        thinking = self._thinking(text)
        said = text[len(thinking) :]
        content, calls, errors, position = [thinking], list[ToolCall](), list[str](), 0
        while mark := self.opening.search(said, position):
            content.append(said[position : mark.start()])
            try:
                read, position = self.read(said, mark, tools)
                position = self._after_closing(said, position)
                calls += [call for call in read if isinstance(call, ToolCall)]
                problems = [problem for problem in read if isinstance(problem, _Unreadable)]
            except _Unreadable as problem:
                position, problems = self._next(said, mark.end()), [problem]
            shown = said[mark.start() : position].strip()
            cut = f"{shown[:_MAX_SHOWN]}…" if len(shown) > _MAX_SHOWN else shown
            errors += [f"this tool call can't be read, since {problem}: {cut} Write it as {self.form}" for problem in problems]
        content.append(said[position:])
        around = "".join(content)
        for mark_around in self.dropped:
            around = around.replace(mark_around, "")
        return ParsedResponse(around.strip(), tuple(calls), tuple(errors))

    def _thinking(self, text: str) -> str:
        """The thinking at the beginning of a response, with its end tag. If neither the response nor the template's header
        opens thinking, a `</think>` counts only before the first call."""
        opened, mark = self.opens_thinking or text.lstrip().startswith("<think>"), self.opening.search(text)
        before, end, _ = (text if opened or mark is None else text[: mark.start()]).partition("</think>")
        return before + end if opened or end else ""

    @abstractmethod
    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[Sequence[ToolCall | _Unreadable], int]:
        """The calls (or faults) after an opening mark, and the position after them. Raises _Unreadable if the form is wrong."""

    def _after_closing(self, text: str, position: int) -> int:
        end = _skip_space(text, position)
        if self.closing and not text.startswith(self.closing, end):
            raise _Unreadable(f"it isn't closed by {self.closing}")
        return end + len(self.closing)

    def _next(self, text: str, position: int) -> int:
        """The position where reading continues after an unreadable call whose opening mark ends at `position`."""
        closed = text.find(self.closing, position) if self.closing else -1
        opened = self.opening.search(text, position)
        ends = [closed + len(self.closing)] if closed >= 0 else []
        return min([*ends, *([opened.start()] if opened else [])], default=len(text))


class HermesParser(MarkedCallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 Pro, Qwen2.5, Qwen3."""

    opening = re.compile("<tool_call>")
    closing = "</tool_call>"
    form = '<tool_call>{"name": …, "arguments": {…}}</tool_call>'

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
        value, end = _json_at(text, mark.end())
        return [_call(value)], end


class Llama3JsonParser(MarkedCallParser):
    """`{"name": …, "parameters": {…}}`, several separated by `;`: Llama 3.1 and 3.2."""

    opening = re.compile(r'(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|function)"\s*:)')
    form = '{"name": …, "parameters": {…}}'
    dropped = ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>")

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
        value, end = _json_at(text, mark.end())
        if isinstance(value, dict) and not value.keys() & {"parameters", "arguments", "function"}:
            return [], end  # an answer in JSON
        follower = _skip_space(text, end)
        return [_call(value)], follower + 1 if text.startswith(";", follower) else end

    def _next(self, text: str, position: int) -> int:
        return len(text)  # the braces inside aren't calls


class PythonTagParser(MarkedCallParser):
    """`<|python_tag|>` and then `name.call(key="value")`, JSON, or Python code: the built-in tools of Llama 3.1."""

    opening = re.compile(re.escape("<|python_tag|>"))
    form = '<|python_tag|>name.call(key="value")'
    dropped = ("<|eom_id|>", "<|eot_id|>")

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
        said = re.split(r"<\|(?:eom_id|eot_id|python_tag)\|>", text[mark.end() :], maxsplit=1)[0]
        end = mark.end() + len(said)
        if said.lstrip().startswith("{"):
            value, end = _json_at(text, mark.end())
            return [_call(value)], end
        try:
            return [_python_call(said)], end
        except _Unreadable:
            for schema in tools:
                parameters = (schema["function"].get("parameters") or {}).get("properties") or {}
                if schema["function"]["name"] in ("python", "code_interpreter") and parameters:
                    return [ToolCall(schema["function"]["name"], {next(iter(parameters)): said.strip()}, "")], end
            raise


class MistralParser(MarkedCallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and from tokenizer v11 on `[TOOL_CALLS]name[ARGS]{…}`."""

    opening = re.compile(re.escape("[TOOL_CALLS]"))
    form = '[TOOL_CALLS][{"name": …, "arguments": {…}}]'
    _NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\](\w+)\s*)?(?:\[ARGS\])?")

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[Sequence[ToolCall | _Unreadable], int]:
        if named := self._NAMED.match(text, mark.end()):
            value, end = _json_at(text, named.end())
            return [_call({"name": named.group(1), "arguments": value, "id": named.group(2) or ""})], end
        values, end = _json_at(text, mark.end())
        return [_call_or_fault(value) for value in (values if isinstance(values, list) else [values])], end


class Qwen3CoderParser(MarkedCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

    opening = re.compile(r"<function=([^>\n]*)>|<tool_call>(?!\s*<function=[^>\n]*>)")
    closing = "</function>"
    form = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    dropped = ("<tool_call>", "</tool_call>")
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=\s*(?:<parameter=|</function>)))", re.S)

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
        if not mark.group(1):
            raise _Unreadable("it names no function")
        types = _types(mark.group(1).strip(), tools)
        arguments, end = dict[str, Any](), mark.end()
        while parameter := self._PARAMETER.match(text, end):
            key, value = parameter.group(1).strip(), parameter.group(2).removeprefix("\n").removesuffix("\n")
            arguments[key], end = _typed(value, types.get(key, {"string"})), parameter.end()
        return [ToolCall(mark.group(1).strip(), arguments, "")], end


class GptOssParser(MarkedCallParser):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`: the harmony format of gpt-oss."""

    opening = re.compile(
        r"(?:<\|start\|>assistant)?(?:\s*to=functions\.([\w.-]+)\s*)?<\|channel\|>"
        r"(?:commentary|analysis)(?:\s+to=functions\.([\w.-]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    )
    form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>"
    dropped = ("<|channel|>final<|message|>", "<|start|>assistant", "<|call|>", "<|return|>", "<|end|>")

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
        name = mark.group(1) or mark.group(2)
        if name is None:  # an analysis, or a preamble to the user
            ended = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z").search(text, mark.end())
            assert ended is not None, "the end of the text matches"
            return [], ended.end()
        value, end = _json_at(text, mark.end())
        return [_call({"name": name, "arguments": value})], end


class DeepSeekParser(MarkedCallParser):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`: V3.1. V3 and R1 write the word `function` before
    the separator, and after it the name and a Markdown block of JSON."""

    opening = re.compile("<｜tool▁call▁begin｜>")
    closing = "<｜tool▁call▁end｜>"
    form = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
    dropped = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _HEAD = re.compile(r"\s*([^\s<]*)\s*<｜tool▁sep｜>(?:\s*([^\s{`<]+)\s*```(?:json)?)?")

    def read(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
        head = self._HEAD.match(text, mark.end())
        if head is None:
            raise _Unreadable("<｜tool▁sep｜> doesn't follow the name")
        value, end = _json_at(text, head.end())
        fence = _skip_space(text, end)
        end = fence + 3 if text.startswith("```", fence) else end
        return [_call({"name": head.group(2) or head.group(1), "arguments": value})], end


def _json_at(text: str, position: int) -> tuple[Any, int]:
    try:
        return _JSON.raw_decode(text, _skip_space(text, position))
    except json.JSONDecodeError as error:
        problem = error.msg
    except ValueError:  # an integer of more than 4,300 digits
        problem = "a number is too long"
    except RecursionError:
        problem = "it is nested too deeply"
    raise _Unreadable(f"its JSON is wrong ({problem})")


def _call(value: Any) -> ToolCall:
    """The call that a JSON value describes. Its arguments may be called `parameters`, or be JSON text."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value | value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise _Unreadable("it names no function")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = _json_at(arguments, 0)
    if not isinstance(arguments, dict):
        raise _Unreadable(f"the arguments of {name} aren't an object")
    found = value.get("id")
    return ToolCall(name, arguments, found if isinstance(found, str) else "")


def _call_or_fault(value: Any) -> ToolCall | _Unreadable:
    try:
        return _call(value)
    except _Unreadable as fault:
        return fault


def _python_call(code: str) -> ToolCall:
    """Reads `name(key=literal)` or `name.call(key=literal)`."""
    try:
        call = ast.parse(code.strip(), mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        function = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "call" else call.func
        assert isinstance(function, ast.Name)
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise _Unreadable("it isn't a call with named literal arguments") from None
    return ToolCall(function.id, arguments, "")


def _types(name: str, tools: Tools) -> Mapping[str, set[str]]:
    """The types that the schema of the tool `name` allows for each parameter."""
    for schema in tools:
        if schema["function"]["name"] == name:
            root = schema["function"].get("parameters") or {}
            named = [part.get("properties") or {} for part in _parts(root, root)]
            return {key: _allowed({"anyOf": [own.get(key) for own in named]}, root) for own in named for key in own}
    return {}


def _allowed(wanted: Any, root: Mapping[str, Any]) -> set[str]:
    found = set[str]()
    for part in _parts(wanted, root):
        own = part.get("type") or ()
        found |= ({own} if isinstance(own, str) else set(own)) | ({"null"} if part.get("nullable") is True else set())
    return found or {"string"}


def _parts(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas that it combines. A `$ref` names a place in `root`; references may form a circle."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    inner = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key) or ()]
    if "$ref" in schema:
        place: Any = root
        for name in str(schema["$ref"]).split("/")[1:]:
            place = place.get(name) if isinstance(place, Mapping) else None
        inner.append(place)
    for part in inner:
        yield from _parts(part, root, depth + 1)


_WORDS = {"True": ("boolean", True), "False": ("boolean", False), "None": ("null", None), "null": ("null", None)}


def _typed(text: str, wanted: set[str]) -> Any:
    """Converts an unquoted value to one of the schema types `wanted`. `True` and `False` become booleans if boolean is wanted,
    `None` and `null` become None if null is wanted. Other JSON is decoded unless string is wanted; the rest stays text."""
    kind, value = _WORDS.get(text.strip(), ("", None))
    if kind in wanted:
        return value
    if "string" in wanted:
        return text
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError, _Unreadable):
        return text


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
