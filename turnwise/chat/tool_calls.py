"""Reads tool calls from sampled text, in eight forms that families of models use in their chat templates and
model cards. A call that can't be read becomes a sentence for the model. `tools.tool_box` checks whether the
tool is known and the arguments fit its schema. Thinking is skipped: text before `</think>` holds no calls."""

import ast
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turnwise.chat.argument_types import ArgumentTypes, typed_value
from turnwise.chat.call_json import Unreadable, call_of, json_at, json_value, skip_space
from turnwise.chat.marked_calls import MAX_UNREADABLE, CallsAndEnd, MarkedCallParser
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ChatTemplateError, ConfigError
from turnwise.protocols.tools import ParsedResponse, ToolCall, ToolCallParser
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.foreign import Foreign
from turnwise.spec import TOOL_PARSERS

_MAX_WRITTEN = 200  # maximum characters of a call that an error shows
_MAX_PYTHON = 2**17
"""Python calls are read in so many characters at the beginning of a response: Python's parser takes a second
for 1 MB."""
_CALL_FILE = "a tool call"
# Python warns of what a model writes, such as `1if`.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=_CALL_FILE)

_TRIAL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {
            "side": {"type": "string", "description": "Which side."},
            "steps": {"type": "integer", "description": "How far."},
        },
        "required": ["side", "steps"],
    },
}
"""The schema of a made-up tool."""
_TRIAL_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"side": "left", "steps": 3},
    {"side": "left"},
)
"""Arguments of made-up calls. Some templates write texts only."""


def find_parser(name: str | None, template: ChatTemplate) -> ToolCallParser:
    """The parser `name`: a registered name or `module:Class`. None chooses the first parser that reads a
    made-up call back as the template writes it. Raises ConfigError if there is no such parser, or none reads
    the template's calls; EnvironmentFault if a user's class can't be instantiated."""
    if name is None:
        return _parser_that_reads(template)
    with Foreign(f"agent.tool_parser {name}: making it", "at the start", are_faults=True):
        parser_class = load_class(TOOL_PARSERS.get(name, name), "agent.tool_parser", ConfigError)
        parser: ToolCallParser = parser_class()
    if not isinstance(parser, ToolCallParser):
        raise ConfigError(
            f"agent.tool_parser: {name} has no method `parse`; see ToolCallParser in "
            "turnwise/protocols/tools.py"
        )
    if isinstance(parser, MarkedCallParser):
        parser.opens_thinking = template.opens_thinking
    return parser


class NoParser:
    """Stands for a parser that couldn't be found: reading a call with it raises ConfigError."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        raise ConfigError(self._problem)


def parser_if_asked(name: str | None, template: ChatTemplate) -> ToolCallParser:
    """`find_parser` for agents that may bring tools of their own: if there is no parser, that is raised when
    the first call is to be read."""
    try:
        return find_parser(name, template)
    except ConfigError as fault:
        return NoParser(str(fault))


def _parser_that_reads(template: ChatTemplate) -> ToolCallParser:
    problem = ""
    for arguments in _TRIAL_ARGUMENTS:
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "look", "arguments": dict(arguments)},
        }
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            written = template.written_call(message)
        except ChatTemplateError as error:
            problem = problem or str(error)
            continue
        for form in TOOL_PARSERS:
            parser = find_parser(form, template)
            if _reads_back(parser, written, arguments, template.opens_thinking):
                return parser
        problem = (
            f"{template.renderer.label} writes tool calls in none of the known forms: "
            f"{written[:_MAX_WRITTEN]!r}"
        )
    raise ConfigError(
        f"agent.tool_parser: {problem}; name the form that the model was taught: {', '.join(TOOL_PARSERS)}, "
        "or your own as module:Class"
    )


def _reads_back(
    parser: ToolCallParser,
    written: str,
    arguments: Mapping[str, Any],
    opens_thinking: bool,
) -> bool:
    """Whether the parser finds in the `written` call exactly the tool `look` with the arguments."""
    if opens_thinking and "</think>" not in written:
        written = f"</think>{written}"
    parsed = parser.parse(written, [{"type": "function", "function": _TRIAL}])
    calls = [(call.name, dict(call.arguments)) for call in parsed.tool_calls]
    return calls == [("look", arguments)] and not parsed.errors


class HermesParser(MarkedCallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 Pro, Qwen2.5, Qwen3."""

    opening = re.compile("<tool_call>")
    closing = "</tool_call>"
    form = '<tool_call>{"name": …, "arguments": {…}}</tool_call>'

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        value, end = json_at(text, mark.end())
        return [call_of(value)], end


class Llama3JsonParser(MarkedCallParser):
    """`{"name": …, "parameters": {…}}`, several separated by `;`: Llama 3.1 and 3.2."""

    opening = re.compile(r'(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|function)"\s*:)')
    form = '{"name": …, "parameters": {…}}'
    dropped = ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>")

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        value, end = json_at(text, mark.end())
        if isinstance(value, dict) and not value.keys() & {"parameters", "arguments", "function"}:
            return [], end  # an answer in JSON
        call = call_of(value)
        follower = skip_space(text, end)
        if text.startswith(";", follower):
            end = follower + 1
        return [call], end

    def _next(self, text: str, position: int) -> int:
        return len(text)  # the braces inside aren't calls


class PythonTagParser(MarkedCallParser):
    """`<|python_tag|>` and then `name.call(key="value")`, JSON, or Python code: the built-in tools of Llama
    3.1."""

    opening = re.compile(re.escape("<|python_tag|>"))
    form = '<|python_tag|>name.call(key="value")'
    dropped = ("<|eom_id|>", "<|eot_id|>")
    _END = re.compile(r"<\|(?:eom_id|eot_id|python_tag)\|>")

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        closing = self._END.search(text, mark.end())
        end = closing.start() if closing else len(text)
        code = text[mark.end() : end]
        if code.lstrip().startswith("{"):
            value, end = json_at(text, mark.end())
            return [call_of(value)], end
        program = _program_call(code, types)
        try:
            if end > _MAX_PYTHON:
                raise Unreadable(f"it stands behind the first {_MAX_PYTHON} characters of the response")
            call = _python_call(code, types.names)
        except Unreadable:
            if program is None:
                raise
            return [program], end
        # Code such as `print(end="")` has the form of a call, too.
        if program is not None and call.name not in types.names:
            call = program
        return [call], end


class MistralParser(MarkedCallParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and from tokenizer v11 on
    `[TOOL_CALLS]name[ARGS]{…}`."""

    opening = re.compile(re.escape("[TOOL_CALLS]"))
    form = '[TOOL_CALLS][{"name": …, "arguments": {…}}]'
    _NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\](\w+)\s*)?(?:\[ARGS\])?")

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        if head := self._NAMED.match(text, mark.end()):
            name, call_id = head.groups(default="")
            arguments, end = json_at(text, head.end())
            return [call_of({"name": name, "arguments": arguments, "id": call_id})], end
        values, end = json_at(text, mark.end())
        if not isinstance(values, list):
            values = [values]
        return _calls_or_faults(values), end


class Qwen3CoderParser(MarkedCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder,
    Qwen3.5."""

    opening = re.compile(r"<function=([^<>\n]*)>|<tool_call>(?!\s*+<function=[^<>\n]*>)")
    closing = "</function>"
    form = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    dropped = ("<tool_call>", "</tool_call>")
    _PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]+)>")
    _VALUE_END = re.compile(r"</parameter>|(?=<parameter=|</function>)")

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        if not mark.group(1):
            raise Unreadable("it names no function")
        texts: dict[str, str] = {}
        end = mark.end()
        while parameter := self._PARAMETER.match(text, end):
            value_end = self._VALUE_END.search(text, parameter.end())
            if value_end is None:
                break
            value = text[parameter.end() : value_end.start()]
            if not value_end.group():  # a parameter that isn't closed ends with its last letter
                value = value.rstrip()
            key = parameter.group(1).strip()
            texts[key] = value.removeprefix("\n").removesuffix("\n")
            end = value_end.end()
        return [_typed_call(mark.group(1).strip(), texts, types)], end


class Glm45Parser(MarkedCallParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5, 4.6 and
    4.7."""

    opening = re.compile("<tool_call>")
    closing = "</tool_call>"
    form = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    _NAME = re.compile(r"\s*+([^<{\[\n]+)")
    _KEY = re.compile(r"\s*+<arg_key>([^<\n]+)</arg_key>\s*+<arg_value>")
    _VALUE_END = "</arg_value>"

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        name = self._NAME.match(text, mark.end())
        if name is None:
            raise Unreadable("it names no function")
        texts: dict[str, str] = {}
        end = name.end()
        while tag := self._KEY.match(text, end):
            key = tag.group(1)
            value_end = text.find(self._VALUE_END, tag.end())
            if value_end < 0:
                raise Unreadable(f"the argument {key[:40]} isn't closed by {self._VALUE_END}")
            texts[key.strip()] = text[tag.end() : value_end]
            end = value_end + len(self._VALUE_END)
        return [_typed_call(name.group(1).strip(), texts, types)], end


class GptOssParser(MarkedCallParser):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`: the harmony format
    of gpt-oss."""

    opening = re.compile(
        r"(?:<\|start\|>assistant\s*+)?(?:to=functions\.([^\s<=]++)\s*+)?<\|channel\|>"
        r"(?:commentary|analysis)(?:\s++to=functions\.([^\s<=]++))?[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>"
    )
    reads_turn_tokens = True
    form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>"
    _END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
    dropped = ("<|channel|>final<|message|>", "<|start|>assistant", "<|call|>", "<|return|>", "<|end|>")

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        name = mark.group(1) or mark.group(2)
        if name is None:  # an analysis, or a preamble to the user
            closing = self._END.search(text, mark.end())
            assert closing is not None, "the end of the text matches"
            return [], closing.end()
        value, end = json_at(text, mark.end())
        return [call_of({"name": name, "arguments": value})], end


class DeepSeekParser(MarkedCallParser):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`: V3.1. V3 and R1 write the word
    `function` before the separator, and after it the name and a Markdown block of JSON."""

    opening = re.compile("<｜tool▁call▁begin｜>")
    closing = "<｜tool▁call▁end｜>"
    form = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
    dropped = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _HEAD = re.compile(r"\s*+([^\s<]*+)\s*+<｜tool▁sep｜>(?:\s*+([^\s{`<]++)\s*+```(?:json)?)?")

    def read(self, text: str, mark: re.Match[str], types: ArgumentTypes) -> CallsAndEnd:
        head = self._HEAD.match(text, mark.end())
        if head is None:
            raise Unreadable("<｜tool▁sep｜> doesn't follow the name")
        arguments, end = json_at(text, head.end())
        fence = skip_space(text, end)
        if text.startswith("```", fence):
            end = fence + 3
        name = head.group(2) or head.group(1)
        return [call_of({"name": name, "arguments": arguments})], end


def _typed_call(name: str, texts: Mapping[str, str], types: ArgumentTypes) -> ToolCall:
    """The call whose arguments are unquoted texts. Each is decoded once, though a response may give it
    thousands of times."""
    types_of_call = types.of(name)
    arguments: dict[str, Any] = {}
    for key, text in texts.items():
        arguments[key] = typed_value(text, types_of_call.get(key, {"string"}))
    return ToolCall(json_value(name), json_value(arguments), "")


def _calls_or_faults(values: Sequence[Any]) -> list[ToolCall | Unreadable]:
    """The calls that JSON values describe, and a fault for each value that describes none, up to
    MAX_UNREADABLE faults."""
    read: list[ToolCall | Unreadable] = []
    num_faults = 0
    for value in values:
        try:
            read.append(call_of(value))
        except Unreadable as fault:
            read.append(fault)
            num_faults += 1
            if num_faults == MAX_UNREADABLE:
                break
    return read


def _program_call(code: str, types: ArgumentTypes) -> ToolCall | None:
    """The call of the tool that runs Python code; None if there is no such tool."""
    for tool in types.tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        parameters = schema.get("properties") or {}
        if function["name"] in ("python", "code_interpreter") and parameters:
            parameter = next(iter(parameters))
            return ToolCall(function["name"], {parameter: code.strip()}, "")
    return None


_CALLED = re.compile(r"\s*+([^\s()\[\]{}\"'=,]++)\s*+(?=\()")


def _python_call(code: str, names: Collection[str]) -> ToolCall:
    """Reads `name(key=literal)` or `name.call(key=literal)`. The name may have other characters than Python's
    names."""
    called = _CALLED.match(code)
    if called is None:
        raise Unreadable("it isn't a call with named literal arguments")
    try:
        source = "f" + code[called.end() :].strip()
        call = ast.parse(source, _CALL_FILE, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        arguments: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise Unreadable("it isn't a call with named literal arguments") from None
    name = called.group(1)
    if name not in names:
        name = name.removesuffix(".call")
    return ToolCall(json_value(name), json_value(arguments), "")
