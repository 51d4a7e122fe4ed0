"""Answers and calls end as the template ends them, in demonstrations and in rollouts.

The templates are written for these tests, with the control flow of published ones.
"""

from __future__ import annotations

import pytest
from chat_messages import assistant, tool, user

from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.chat.turn_ends import is_taught
from turnwise.errors import ChatTemplateError
from turnwise.testing.fakes import byte_tokenizer

LOOK = tool("look", "Looks.", side="string")
CALL = {"name": "look", "arguments": {"side": "leftward"}}
CALLED = assistant("") | {"tool_calls": [{"id": "call00007", "type": "function", "function": CALL}]}
RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00007", "content": "a wall"}
TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
JSON_CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
CALLS = "{% for t in m.tool_calls %}{% set c = t.function %}"
LLAMA = ("<|begin|>", "<|header|>", "<|/header|>", "<|eot_id|>", "<|eom_id|>")
HEADER = "{{ '<|header|>' + m.role + '<|/header|>' }}"

METHARME = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|model|>"
    "{% else %}{{ '<|' + m.role + '|>' }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% else %}{{ eos_token }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + (m.content.split('</think>') | last) + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}"
)
EOM = (
    TOOLS
    + "{% for m in messages %}"
    + HEADER
    + "{% if m.tool_calls %}"
    + CALLS
    + JSON_CALL
    + "{% endfor %}<|eom_id|>"
    "{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>' }}{% endif %}"
)
GLM = (
    TOOLS + "{% for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>' }}{{ "
    "m.content }}"
    "{% if m.tool_calls %}" + CALLS + "{{ '<tool_call>' + c.name }}{% for k, v in c.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key><arg_value>' + v + '</arg_value>' }}{% endfor %}</tool_call>{% endfor "
    "%}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OWN_MESSAGE = (
    TOOLS + "{% for m in messages %}{{ m.role + '<|role_sep|>' + m.content + '<|message_sep|>' }}{% if "
    "m.tool_calls %}"
    + CALLS
    + "{{ 'call<|role_sep|>' }}"
    + JSON_CALL
    + "{{ '<|message_sep|>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant<|role_sep|>' }}{% endif %}"
)
TEXT_ARGUMENTS = (
    TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if "
    "m.tool_calls %}" + CALLS
    + "{{ '<tool_call>{\"name\": \"' + c.name + '\", \"arguments\": ' + c.arguments + '}</tool_call>' }}{% "
    "endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
GLM_TOKENS = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<tool_call>",
    "</tool_call>",
    "<|endoftext|>",
)


def made(source: str, *tokens: str, eos: str = "", ends: tuple[str, ...] = ()) -> ChatTemplate:
    tokenizer = byte_tokenizer(tokens, source, eos_token=eos or tokens[-1], bos_token=tokens[0])
    return ChatTemplate(tokenizer, eos_token_ids=tokenizer.convert_tokens_to_ids(list(ends)))


def taught(template: ChatTemplate, messages, tools=()) -> list[str]:
    sample = encode_demonstration(template, messages, tools)
    return [template.tokenizer.decode(sample.token_ids[span.start : span.stop]) for span in sample.turn_spans]


def shown(template: ChatTemplate, messages, tools=()) -> str:
    return template.tokenizer.decode(encode_demonstration(template, messages, tools).token_ids)


def test_a_role_s_token_stays_where_an_answer_ends_with_the_end_of_text():
    template = made(METHARME, "<s>", "<|user|>", "<|model|>", "<|system|>", "</s>")
    messages = [user("first"), assistant("Right"), user("second"), assistant("Left")]
    assert taught(template, messages) == ["Right</s>", "Left</s>"]
    assert shown(template, messages) == "<s><|user|>first<|model|>Right</s><|user|>second<|model|>Left</s>"
    cut = template.tokenizer.encode("Ri", add_special_tokens=False)
    for response in (cut, [*cut, template.tokenizer.eos_token_id]):
        tail = template.extend(response, [user("second")])
        assert template.tokenizer.decode(tail) == "<|user|>second<|model|>"


def test_a_tag_of_the_next_header_is_no_end_of_turn():
    template = made(NO_END, "<s>", "<think>", "</s>")
    assert template.stop_token_ids == (template.tokenizer.eos_token_id,)
    messages = [user("first"), assistant("</think>Right"), user("second"), assistant("</think>Left")]
    assert taught(template, messages) == ["</think>Right", "</think>Left"]
    text = shown(template, messages)
    assert "first" in text and "second" in text and "turnwise" not in text


@pytest.mark.parametrize("ends", [(), ("<|eom_id|>",)])
def test_calls_that_end_with_another_token_than_answers(ends):
    template = made(EOM, *LLAMA, eos="<|eot_id|>", ends=ends)
    messages = [user("Look."), CALLED, RESULT, assistant("A wall.")]
    call = '{"name": "look", "arguments": {"side": "leftward"}}'
    assert taught(template, messages, [LOOK]) == [f"{call}<|eom_id|>", "A wall.<|eot_id|>"]
    assert shown(template, messages, [LOOK]).endswith(
        f"{call}<|eom_id|><|header|>tool<|/header|>a wall<|eot_id|><|header|>assistant<|/header|>A "
        "wall.<|eot_id|>"
    )
    assert template.tokenizer.convert_tokens_to_ids("<|eom_id|>") in template.stop_token_ids


@pytest.mark.parametrize("end", ["<|eom_id|>", "<|eot_id|>", ""])
def test_a_call_has_one_end_in_a_rollout(end):
    template = made(EOM, *LLAMA, eos="<|eot_id|>")
    sampled = template.tokenizer.encode('{"name": "look"}' + end, add_special_tokens=False)
    tail = template.tokenizer.decode(template.extend(sampled, [RESULT], [LOOK]))
    result = "<|header|>tool<|/header|>a wall<|eot_id|><|header|>assistant<|/header|>"
    assert tail == (result if end else "<|eom_id|>" + result)


@pytest.mark.parametrize("ends", [(), ("<|user|>", "<|observation|>")])
def test_a_call_ends_with_the_role_of_its_result_where_roles_end_turns(ends):
    template = made(GLM, *GLM_TOKENS, ends=ends)
    call = "<tool_call>look<arg_key>side</arg_key><arg_value>leftward</arg_value></tool_call>"
    [learnt, _] = taught(template, [user("Look."), CALLED, RESULT, assistant("A wall.")], [LOOK])
    assert learnt == f"{call}<|observation|>"
    sampled = template.tokenizer.encode(learnt, add_special_tokens=False)
    assert template.tokenizer.decode(template.extend(sampled, [RESULT], [LOOK])) == "a wall<|assistant|>"
    assert (
        template.tokenizer.decode(template.extend(sampled[:-1], [RESULT], [LOOK]))
        == "<|observation|>a wall<|assistant|>"
    )
    [read] = find_parser(None, template).parse(call, [LOOK]).tool_calls
    assert (read.name, read.arguments) == ("look", {"side": "leftward"})


def test_a_call_that_is_a_message_of_its_own_is_refused():
    template = made(OWN_MESSAGE, "<s>", "<|role_sep|>", "<|message_sep|>")
    with pytest.raises(ChatTemplateError, match="doesn't write tool calls at the beginning of a response"):
        taught(template, [user("Look."), CALLED], [LOOK])


GEMMA = (
    TOOLS + "{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>' }}{% if "
    "m.tool_calls %}" + CALLS + JSON_CALL
    + "{% endfor %}{% if loop.last %}{{ m.content }}{% endif %}<|eom_id|>{% else %}{{ m.content + "
    "'<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>' }}{% endif %}"
)  # fmt: skip


def test_content_before_a_call_is_taught_before_it_or_refused():
    hermes = TEXT_ARGUMENTS.replace("c.arguments +", "(c.arguments | tojson) +")
    template = made(hermes, "<s>", "<|im_start|>", "<|im_end|>")
    [learnt] = taught(template, [user("Look."), CALLED | {"content": "I look."}], [LOOK])
    assert learnt.startswith("I look.<tool_call>")
    moved = made(GEMMA, *LLAMA, eos="<|eot_id|>")
    assert taught(moved, [user("Look."), CALLED, RESULT, assistant("A wall.")], [LOOK])
    with pytest.raises(ChatTemplateError, match="after all of the message's content"):
        taught(moved, [user("Look."), CALLED | {"content": "I look."}, RESULT, assistant("A wall.")], [LOOK])


BOTH_TAGS = (
    TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think></think>{{ "
    "m.content.split('</think>') | last }}"
    "{% else %}{{ m.content }}{% endif %}{% if m.tool_calls %}" + CALLS + JSON_CALL
    + "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)  # fmt: skip


@pytest.mark.parametrize("content", ["Hm.\n</think>\n", "<think>\nHm.\n</think>\n"])
def test_thinking_before_a_call_may_lack_the_tag_that_the_header_writes(content):
    template = made(BOTH_TAGS, "<s>", "<|im_start|>", "<|im_end|>")
    [learnt] = taught(template, [user("Look."), CALLED | {"content": content}], [LOOK])
    assert learnt.startswith('Hm.\n</think>\n{"name": "look"')
    assert taught(template, [user("Look."), CALLED], [LOOK])[0].startswith('</think>{"name": "look"')
    silent = made(BOTH_TAGS.replace("<think></think>", ""), "<s>", "<|im_start|>", "<|im_end|>")
    with pytest.raises(ChatTemplateError, match="the header opens <think>"):
        taught(silent, [user("Look."), CALLED], [LOOK])


@pytest.mark.parametrize(
    ("header", "content", "learnt"),
    [
        (
            "<think>\n\n",
            "<think>\nHm.\n</think>\n",
            "Hm.\n</think>\n{",
        ),  # with one line break more than the history
        ("<think>\n\n</think>\n\n", "", "{"),
        ("<|channel>thought\n<channel|>", "", "{"),
        ("<think>\n\n</think>\n\n", "<think>\nHm.\n</think>\n", None),
        ("Well: ", "", None),
    ],
)
def test_a_call_follows_a_header_that_writes_thinking_as_history_does_not(header, content, learnt):
    ask = "{{ '<|header|>assistant<|/header|>' }}"
    template = made(EOM.replace(ask, ask + header).replace("{% if m.tool_calls %}", "{% if m.tool_calls "
    "%}{{ m.content }}"),
                    *LLAMA, "<|channel>", "<channel|>", eos="<|eot_id|>")  # fmt: skip
    messages = [user("Look."), CALLED | {"content": content}]
    if learnt is None:
        with pytest.raises(ChatTemplateError, match="at the beginning of a response"):
            taught(template, messages, [LOOK])
    else:
        [text] = taught(template, messages, [LOOK])
        assert text.startswith(f'{learnt}"name": "look"') and text.endswith("<|eom_id|>")


def test_arguments_are_given_as_text_to_templates_that_take_texts_only():
    template = made(TEXT_ARGUMENTS, "<s>", "<|im_start|>", "<|im_end|>")
    [learnt] = taught(template, [user("Look."), CALLED], [LOOK])
    assert learnt == '<tool_call>{"name": "look", "arguments": {"side": "leftward"}}</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"name": "look", "arguments": {"side": "leftward"}}', True),
        ("look(side='leftward')", True),
        ('{"name": "look", "arguments": {}}', False),
        ('{"name": "", "arguments": {"side": "leftward"}}', False),
        ("", False),
    ],
)
def test_a_taught_text_holds_name_and_arguments(text, is_right):
    assert is_taught(CALLED, text) == is_right
    asked = made(EOM, *LLAMA, eos="<|eot_id|>")._turns.prefix[0]["content"]
    assert not is_taught(CALLED, text + asked), "nothing made-up is taught"


MOVED = EOM.replace(TOOLS, "").replace(HEADER, "{% if loop.last %}" + TOOLS + "{% endif %}" + HEADER)
GROUPED = EOM.replace(
    "{{ m.content + '<|eot_id|>' }}", "{{ m.content + ('' if tools and m.role == 'tool' else '<|eot_id|>') }}"
)


@pytest.mark.parametrize(
    ("source", "is_rewritten"), [(EOM, False), (MOVED, True), (GROUPED, False), (GLM, False)]
)
def test_history_that_is_rewritten_only_with_tools_is_noticed(source, is_rewritten, caplog):
    tokens = GLM_TOKENS if source == GLM else LLAMA
    template = made(source, *tokens, eos="<|endoftext|>" if source == GLM else "<|eot_id|>")
    assert (template.rewrites_history, template.rewrites_tool_history) == (False, is_rewritten)
    template.announce_rewrites(has_tools=True)
    assert ("list of tools" in caplog.text) == is_rewritten
