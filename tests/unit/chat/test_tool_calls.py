"""Calls are read in the forms that families of models publish, and what can't be read becomes a sentence."""

from __future__ import annotations

import asyncio
import json

import pytest
from chat_messages import assistant, tool, user
from toy_tools import TOOL_CHATML

from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import (
    DeepSeekParser,
    Glm45Parser,
    GptOssParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    PythonTagParser,
    Qwen3CoderParser,
    find_parser,
)
from turnwise.errors import ConfigError
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams

WEATHER = tool(
    "weather", "The weather of a town.", town="string", days="integer", where="object", is_metric="boolean"
)
PYTHON = tool("python", "Runs a program.", code="string")
PARIS = ("weather", {"town": "Paris", "days": 2})
ROME = ("weather", {"town": "Rome"})
TO_PARIS, TO_ROME = (json.dumps(arguments) for _, arguments in (PARIS, ROME))
ASK_PARIS, ASK_ROME = (
    f'{{"name": "weather", "arguments": {arguments}}}' for arguments in (TO_PARIS, TO_ROME)
)
OF_LLAMA, ROME_OF_LLAMA = (
    f'{{"name": "weather", "parameters": {arguments}}}' for arguments in (TO_PARIS, TO_ROME)
)
THOUGHT = '<think>\n<tool_call>{"name": "no"}</tool_call>?\n</think>'
SAY = '{"name": "say", "arguments": {"text": "a </tool_call> {b} \\"c\\"", "in": {"d": [{}]}}}'

READABLE = [
    # The chat template of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B; NousResearch/Hermes-2-Pro-Llama-3-8B's
    # model card.
    (HermesParser, f"<tool_call>\n{ASK_PARIS}\n</tool_call>", [PARIS], ""),
    (
        HermesParser,
        f"I ask twice.\n<tool_call>\n{ASK_PARIS}\n</tool_call>\n<tool_call>\n{ASK_ROME}\n</tool_call>",
        [PARIS, ROME],
        "I ask twice.",
    ),
    (HermesParser, f"{THOUGHT}\n\n<tool_call>{ASK_ROME}</tool_call>", [ROME], THOUGHT),
    (
        HermesParser,
        f"<think>\n<tool_call>{ASK_ROME}</tool_call>",
        [],
        f"<think>\n<tool_call>{ASK_ROME}</tool_call>",
    ),
    (
        HermesParser,
        '<tool_call>{"name": "weather", "arguments": "{\\"town\\": \\"Rome\\"}"}</tool_call>',
        [ROME],
        "",
    ),
    (
        HermesParser,
        f"<tool_call>{SAY}</tool_call>",
        [("say", {"text": 'a </tool_call> {b} "c"', "in": {"d": [{}]}})],
        "",
    ),
    # The chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
    (
        Qwen3CoderParser,
        "<tool_call>\n<function=weather>\n<parameter=town>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        [PARIS],
        "",
    ),
    (
        Qwen3CoderParser,
        'Now.\n<function=weather>\n<parameter=town>\n7\n</parameter>\n<parameter=where>\n{"a": '
        "[1]}\n</parameter>\n"
        "<parameter=is_metric>\ntrue\n</parameter>\n</function>",
        [("weather", {"town": "7", "where": {"a": [1]}, "is_metric": True})],
        "Now.",
    ),
    (Qwen3CoderParser, "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})], ""),
    (
        Qwen3CoderParser,
        "<tool_call>\n<function=say>\n<parameter=text>\nfirst\n\nlast\n</parameter>\n</function>\n</tool_call>",
        [("say", {"text": "first\n\nlast"})],
        "",
    ),
    # Meta's prompt format of Llama 3.1: JSON-based tool calling; several calls divided by semicolons, as vLLM
    # reads them.
    (Llama3JsonParser, OF_LLAMA, [PARIS], ""),
    (Llama3JsonParser, f"<|python_tag|>{OF_LLAMA}; {ROME_OF_LLAMA}<|eom_id|>", [PARIS, ROME], ""),
    (
        Llama3JsonParser,
        'A set {1, 2} and {"a": 1} are no calls.',
        [],
        'A set {1, 2} and {"a": 1} are no calls.',
    ),
    (Llama3JsonParser, '{"type": "function", "name": "weather", "parameters": {"town": "Rome"}}', [ROME], ""),
    # Meta's prompt format of Llama 3.1: built-in tools and the code interpreter.
    (PythonTagParser, '<|python_tag|>weather.call(town="Paris", days=2)<|eom_id|>', [PARIS], ""),
    (PythonTagParser, 'So: <|python_tag|>weather(town="Rome")', [ROME], "So:"),
    (PythonTagParser, f"<|python_tag|>{ROME_OF_LLAMA}", [ROME], ""),
    (
        PythonTagParser,
        "<|python_tag|>import math\nprint(1)<|eom_id|>",
        [("python", {"code": "import math\nprint(1)"})],
        "",
    ),
    # Mistral's cookbook, tokenizers v3 and v7; mistralai/Magistral-Small-2507 and later, tokenizer v11.
    (MistralParser, f'[TOOL_CALLS][{ASK_PARIS[:-1]}, "id": "a1b2c3d4e"}}]', [PARIS], ""),
    (MistralParser, f"Both. [TOOL_CALLS] [{ASK_PARIS}, {ASK_ROME}]", [PARIS, ROME], "Both."),
    (
        MistralParser,
        f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{TO_PARIS}[TOOL_CALLS]weather[ARGS]{TO_ROME}",
        [PARIS, ROME],
        "",
    ),
    # openai/harmony's format guide.
    (
        GptOssParser,
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{TO_PARIS}<|call|>",
        [PARIS],
        "",
    ),
    (
        GptOssParser,
        f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{TO_ROME}",
        [ROME],
        "",
    ),
    (
        GptOssParser,
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It "
        "rains.<|return|>",
        [],
        "It rains.",
    ),
    # The chat templates of deepseek-ai/DeepSeek-V3.1 and deepseek-ai/DeepSeek-R1-0528.
    (
        DeepSeekParser,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TO_PARIS}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TO_ROME}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, ROME],
        "",
    ),
    (
        DeepSeekParser,
        "</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{TO_PARIS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS],
        "</think>I look.",
    ),
]


@pytest.mark.parametrize(("parser", "text", "calls", "content"), READABLE)
def test_published_forms_are_read(parser, text, calls, content):
    parsed = parser().parse(text, [WEATHER, PYTHON])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.content == content and parsed.errors == ()


A_IS_1 = json.dumps({"a": 1})
FORMS = [
    (HermesParser, f'<tool_call>{{"name": "NAME", "arguments": {A_IS_1}}}</tool_call>'),
    (Qwen3CoderParser, "<tool_call><function=NAME><parameter=a>1</parameter></function></tool_call>"),
    (Glm45Parser, "<tool_call>NAME<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
    (Llama3JsonParser, f'{{"name": "NAME", "parameters": {A_IS_1}}}'),
    (PythonTagParser, "<|python_tag|>NAME.call(a=1)"),
    (PythonTagParser, "<|python_tag|>NAME(a=1)"),
    (MistralParser, f"[TOOL_CALLS]NAME[ARGS]{A_IS_1}"),
    (GptOssParser, f"<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{A_IS_1}<|call|>"),
    (
        GptOssParser,
        f"<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{A_IS_1}<|call|>",
    ),
    (DeepSeekParser, f"<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{A_IS_1}<｜tool▁call▁end｜>"),
]


@pytest.mark.parametrize(("parser", "form"), FORMS)
def test_tools_of_servers_have_names_that_are_no_names_of_python(parser, form):
    for name in ("get-weather", "a.b", "repo/read", "a:b", "ünï", "9x", "a.call"):
        parsed = parser().parse(form.replace("NAME", name), [tool(name, "Does it.", a="integer"), PYTHON])
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == [(name, {"a": 1})], name
        assert parsed.content == ""


def test_python_that_calls_no_tool_is_a_program():
    for code in ('frame.sort(by="a")', "print(end=1)", "1if 2else 3"):
        [call] = PythonTagParser().parse(f"<|python_tag|>{code}", [WEATHER, PYTHON]).tool_calls
        assert (call.name, call.arguments) == ("python", {"code": code})


NESTED = {"d": [{"e": '} ] </tool_call> " {'}]}
OBJECT = json.dumps({"where": NESTED})
CALLS = {
    HermesParser: f'<tool_call>{{"name": "weather", "arguments": {OBJECT}}}</tool_call>',
    Qwen3CoderParser: f"<function=weather>\n<parameter=where>\n{json.dumps(NESTED)}\n"
    "</parameter>\n</function>",
    Llama3JsonParser: f'{{"name": "weather", "parameters": {OBJECT}}}',
    PythonTagParser: f"<|python_tag|>weather.call(where={NESTED!r})",
    MistralParser: f'[TOOL_CALLS][{{"name": "weather", "arguments": {OBJECT}}}]',
    GptOssParser: f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OBJECT}",
    DeepSeekParser: f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>",
}


@pytest.mark.parametrize("parser", CALLS)
def test_nested_braces_are_an_argument_and_a_call_that_is_cut_in_its_arguments_is_an_error(parser):
    [call] = parser().parse(CALLS[parser], [WEATHER]).tool_calls
    assert (call.name, call.arguments) == ("weather", {"where": NESTED})
    for stop in range(CALLS[parser].index("where"), len(CALLS[parser])):
        cut = parser().parse(CALLS[parser][:stop], [WEATHER])
        assert (len(cut.tool_calls), len(cut.errors)) == (0, 1), CALLS[parser][:stop]


def test_an_id_of_the_model_is_kept():
    [first, second] = (
        MistralParser().parse("[TOOL_CALLS]a[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]b[ARGS]{}", []).tool_calls
    )
    assert (first.id, second.id) == ("a1b2c3d4e", "")


@pytest.mark.parametrize(
    ("parser", "text", "said"),
    [
        (HermesParser, f"<tool_call>{ASK_ROME}", "it isn't closed by </tool_call>"),
        (HermesParser, f"<tool_call>{ASK_ROME[:-1]}</tool_call>", "its JSON is wrong (Expecting"),
        (HermesParser, "<tool_call>weather(Rome)</tool_call>", "its JSON is wrong (Expecting value)"),
        (HermesParser, '<tool_call>["weather"]</tool_call>', "it names no function"),
        (HermesParser, '<tool_call>{"name": 7, "arguments": {}}</tool_call>', "it names no function"),
        (
            HermesParser,
            '<tool_call>{"name": "weather", "arguments": ["Rome"]}</tool_call>',
            "the arguments of weather aren't an object",
        ),
        (
            HermesParser,
            '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
            "NaN isn't a JSON number",
        ),
        (HermesParser, "<tool_call>" + "[" * 100_000, "it is nested too deeply"),
        (
            HermesParser,
            '<tool_call>{"name": "a", "arguments": {"x": ' + "7" * 5000 + "}}</tool_call>",
            "a number is too long",
        ),
        (
            Qwen3CoderParser,
            "<tool_call>\n<function=weather>\n<parameter=town>\nRome",
            "it isn't closed by </function>",
        ),
        (Qwen3CoderParser, "<tool_call>\n<function=weather", "it names no function"),
        (Qwen3CoderParser, '<tool_call>\n{"name": "weather"}\n</tool_call>', "it names no function"),
        (Llama3JsonParser, '{"name": "weather", "parameters": {"name": "Rome"', "its JSON is wrong"),
        (
            PythonTagParser,
            "<|python_tag|>weather.call(town=Rome)",
            "it isn't a call with named literal arguments",
        ),
        (
            PythonTagParser,
            '<|python_tag|>weather.call("Rome")',
            "it isn't a call with named literal arguments",
        ),
        (MistralParser, f"[TOOL_CALLS][{ASK_ROME[:-1]}", "its JSON is wrong"),
        (MistralParser, "[TOOL_CALLS]weather[ARGS]Rome", "its JSON is wrong"),
        (
            GptOssParser,
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{'town': 1}<|call|>",
            "its JSON is wrong",
        ),
        (
            DeepSeekParser,
            f"<｜tool▁call▁begin｜>weather{TO_ROME}<｜tool▁call▁end｜>",
            "<｜tool▁sep｜> doesn't follow the name",
        ),
        (
            DeepSeekParser,
            f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TO_ROME}",
            "it isn't closed by <｜tool▁call▁end｜>",
        ),
    ],
)
def test_a_call_that_can_not_be_read_is_one_sentence(parser, text, said):
    parsed = parser().parse(f"Well. {text}", [WEATHER])
    assert parsed.tool_calls == () and len(parsed.errors) == 1
    assert said in parsed.errors[0] and parsed.errors[0].endswith(f"Write it as {parser.form}")
    assert len(parsed.errors[0]) < 400


@pytest.mark.parametrize(
    ("parser", "text", "calls", "faults"),
    [
        (
            HermesParser,
            f"<tool_call>{{broken</tool_call><tool_call>{ASK_ROME}</tool_call><tool_call>{ASK_ROME}",
            [ROME],
            ["its JSON is wrong", "it isn't closed by"],
        ),
        # A call that is never closed doesn't swallow the next.
        (
            HermesParser,
            '<tool_call>{"name": "a"} <tool_call>{"name": "b"}</tool_call>',
            [("b", {})],
            ["it isn't closed by"],
        ),
        (MistralParser, f'[TOOL_CALLS][{ASK_ROME}, {{"arguments": {{}}}}]', [ROME], ["it names no function"]),
    ],
)
def test_an_unreadable_call_leaves_the_others(parser, text, calls, faults):
    parsed = parser().parse(text, [])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert all(fault in error for fault, error in zip(faults, parsed.errors, strict=True))


def writing(call: str) -> ChatTemplate:
    """A template of ChatML that writes each call, `c`, as the Jinja text `call`."""
    called = "{% for t in m.tool_calls or () %}{% set c = t.function %}" + call + "{% endfor %}"
    return ChatTemplate(
        byte_tokenizer(), TOOL_CHATML.replace("{{ m.content }}", "{{ m.content or '' }}" + called)
    )


JSON_CALL = '{"name": "{{ c.name }}", "ARGUMENTS": {{ c.arguments | tojson }}}'
ARGUMENTS = "{% for k, v in c.arguments.items() %}"
FUNCTION = (
    "<function={{ c.name }}>"
    + ARGUMENTS
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}</function>"
)
GLM = (
    "<tool_call>{{ c.name }}\n"
    + ARGUMENTS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}"
)
DEEPSEEK = "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>"
HARMONY = "<|channel|>commentary to=functions.{{ c.name }}<|message|>{{ c.arguments | tojson }}<|call|>"


@pytest.mark.parametrize(
    ("call", "parser"),
    [
        ("<tool_call>" + JSON_CALL.replace("ARGUMENTS", "arguments") + "</tool_call>", HermesParser),
        ("<tool_call>" + FUNCTION + "</tool_call>", Qwen3CoderParser),
        (GLM + "</tool_call>", Glm45Parser),
        ("[TOOL_CALLS][" + JSON_CALL.replace("ARGUMENTS", "arguments") + "]", MistralParser),
        (JSON_CALL.replace("ARGUMENTS", "parameters"), Llama3JsonParser),
        (DEEPSEEK, DeepSeekParser),
        (HARMONY, GptOssParser),
    ],
)
def test_the_form_is_the_one_in_which_the_template_s_own_call_is_read_back(call, parser):
    template = writing(call)
    assert type(find_parser(None, template)) is parser
    assert type(find_parser("python_tag", template)) is PythonTagParser, "a form that is asked for holds"


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{{ c.name }}</tool_call>",  # the arguments are lost
        '<function={{ c.name }}>{{ c.arguments | tojson }}</function>{% if false %}"<tool_call>"{% endif %}',
        '<invoke name="{{ c.name }}">'
        + ARGUMENTS
        + '<parameter name="{{ k }}">{{ v }}</parameter>{% endfor %}</invoke>',
    ],
)
def test_a_form_that_no_parser_reads_is_refused_whatever_marks_the_template_holds(call):
    with pytest.raises(ConfigError, match=r"agent\.tool_parser: .*name the form"):
        find_parser(None, writing(call))


def test_a_form_that_nothing_tells_has_to_be_named():
    template = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
    with pytest.raises(ConfigError, match=r"doesn't show a tool call.*name the form"):
        find_parser(None, template)
    with pytest.raises(ConfigError, match=r"agent\.tool_parser"):
        find_parser("hermez", template)


def conversation_of(texts, parser, tools):
    """A conversation in which a scripted model says the texts."""
    template = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
    contexts = TokenContexts(template, ScriptedServer(map(template.respond, texts)), 2048, "episode", parser)
    return contexts(SamplingParams(max_new_tokens=400), tools=tools)


def test_a_conversation_with_tools_gives_calls_and_errors_of_the_sampled_text():
    call = '<tool_call>{"name": "weather", "arguments": {"town": "Rome"}}</tool_call>'
    texts = (f"Two. {call}{call}", "<tool_call>no</tool_call>", "Sunny.")
    conversation = conversation_of(texts, HermesParser(), [WEATHER])

    async def play():
        replies = [await conversation.generate([user("Rome?")])]
        for _ in range(2):
            result = {"role": "tool", "name": "weather", "tool_call_id": "t001c0000", "content": "sun"}
            replies.append(await conversation.generate([result]))
        conversation.verify()
        return replies, conversation.turns

    (first, second, third), turns = asyncio.run(play())
    assert [entry["id"] for entry in first["tool_calls"]] == ["t001c0000", "t001c0001"]
    assert first["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"town": "Rome"}}
    assert turns[0].text == turns[0].messages[-1]["content"] == f"Two. {call}{call}"
    assert first["content"] == "Two." and first["call_errors"] == []
    assert second["tool_calls"] == [] and "its JSON is wrong" in second["call_errors"][0]
    assert third == assistant("Sunny.") | {"tool_calls": [], "call_errors": []}
    assert "sun" in turns[1].observation and not turns[1].starts_context


def test_without_tools_nothing_is_parsed():
    conversation = conversation_of(["<tool_call>no"], HermesParser(), tools=())
    assert asyncio.run(conversation.generate([user("Hi")])) == assistant("<tool_call>no")


def test_an_end_of_thinking_inside_a_call_is_its_argument():
    call = '<tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>'
    for text in (call, f"<think>hm</think>{call}", f"hm</think>{call}"):
        assert [c.arguments for c in HermesParser().parse(text, []).tool_calls] == [{"text": "</think>"}]


def test_an_answer_in_json_is_no_call_of_llama():
    assert Llama3JsonParser().parse('{"name": "Bob", "age": 3}', []) == ("", (), ())


def test_values_of_qwen3_coder_that_are_no_json_stay_texts():
    text = f"<function=weather><parameter=days>{'7' * 5000}</parameter>"
    text += "<parameter=where>NaN</parameter></function>"
    [call] = Qwen3CoderParser().parse(text, [WEATHER]).tool_calls
    assert call.arguments == {"days": "7" * 5000, "where": "NaN"}


@pytest.mark.parametrize(
    ("ids", "kept"),
    [(("a1b2c3d4e", "f1b2c3d4e"), True), (("a1b2c3d4e",) * 2, False), (("x", "f1b2c3d4e"), False)],
)
def test_ids_of_the_model_are_kept_where_templates_take_them(ids, kept):
    said = "".join(f"[TOOL_CALLS]a[CALL_ID]{call_id}[ARGS]{{}}" for call_id in ids)
    reply = asyncio.run(conversation_of([said], MistralParser(), [WEATHER]).generate([user("?")]))
    found = tuple(call["id"] for call in reply["tool_calls"])
    assert (found == ids) == kept and len(set(found)) == 2 and all(len(call_id) == 9 for call_id in found)


def test_thinking_that_the_header_has_opened_and_nobody_ends_holds_no_calls():
    text = CHAT_TEMPLATE.replace("assistant\\n", "assistant\\n<think>\\n")
    parser = find_parser("hermes", ChatTemplate(byte_tokenizer(), text))
    call = '<tool_call>{"name": "weather", "arguments": {"town": "Rome"}}</tool_call>'
    assert parser.parse(f"hm {call}", []).tool_calls == ()
    [read] = parser.parse(f"hm</think>{call}", []).tool_calls
    assert read.arguments == {"town": "Rome"}


OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
DEFS = {"Trip": {"type": "object"}, "Circle": {"$ref": "#/$defs/Circle"}}
TRIP = {"$ref": "#/$defs/Trip"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", {"type": "boolean"}, True),
        ("None", OPTIONAL, None),
        ("5", OPTIONAL, 5),
        ("None", {"type": "integer", "nullable": True}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("5", True, "5"),
        ("5", {}, "5"),
        ('{"to": "Rome"}', TRIP, {"to": "Rome"}),
        ('{"to": "Rome"}', {"allOf": [TRIP], "title": "A trip."}, {"to": "Rome"}),
        ("None", {"oneOf": [TRIP, {"type": "null"}]}, None),
        ("5", {"$ref": "#/$defs/Circle"}, "5"),
        ("5", {"$ref": "#/$defs/Nothing/else"}, "5"),
    ],
)
def test_an_unquoted_value_has_a_type_that_its_schema_allows(text, schema, value):
    said = f"<tool_call>\n<function=f>\n<parameter=n>\n{text}\n</parameter>\n</function>\n</tool_call>"
    own = {"properties": {"n": schema}}
    composed = {"$defs": DEFS | {"Own": own}, "$ref": "#/$defs/Own"}
    for parameters, expected in ((own | {"$defs": DEFS}, value), (composed, value), (None, text)):
        [read] = (
            Qwen3CoderParser().parse(said, [{"function": {"name": "f", "parameters": parameters}}]).tool_calls
        )
        assert read.arguments == {"n": expected}


def test_a_value_has_a_type_that_any_part_of_the_schema_allows():
    parts = [{"properties": {"n": {"type": "integer"}}}, {"properties": {"n": {"description": "How many."}}}]
    said = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
    [read] = (
        Qwen3CoderParser()
        .parse(said, [{"function": {"name": "f", "parameters": {"allOf": parts}}}])
        .tool_calls
    )
    assert read.arguments == {"n": 5}
