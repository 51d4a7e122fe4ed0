"""The bridge on the published templates: separators are the template's and the end of a turn stands once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from chat_messages import LLAMA2, assistant, system, tool, user
from hypothesis import HealthCheck, given, settings

from turnwise.chat.message_content import key_of
from turnwise.chat.rendering import SENTINEL
from turnwise.chat.template import ChatTemplate
from turnwise.errors import ChatTemplateError
from turnwise.testing.fakes import byte_tokenizer

PROPERTY = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Text that every template keeps: no outer white space, which some trim, and no "<" or "[", which could spell
# a special token.
KEPT = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]|", exclude_categories=["Z", "C"]),
    min_size=1,
    max_size=12,
)
TOOL = tool("look", "Looks.")


def special(template, text):
    return template.tokenizer.convert_tokens_to_ids(text)


def full_render(template, messages, **kwargs):
    text = template.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, date_string="26 Jul 2024", **kwargs
    )
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def appended(template, texts, answers, first=()):
    """Ids of a conversation in which texts and answers take turns, built turn by turn."""
    ids = template.start([*first, user(texts[0])])
    for answer, text in zip(answers, texts[1:], strict=True):
        response = template.respond(answer)
        ids += response + template.extend(response, [user(text)])
    return ids


@PROPERTY
@given(texts=st.lists(KEPT, min_size=1, max_size=4), data=st.data())
def test_appended_ids_are_those_of_a_full_render(template, texts, data):
    answers = [data.draw(KEPT) for _ in texts[1:]]
    messages = [user(texts[0])]
    for answer, text in zip(answers, texts[1:], strict=True):
        messages += [assistant(answer), user(text)]
    assert appended(template, texts, answers) == full_render(template, messages)


def test_a_system_prompt_stays_in_front(template, family):
    if not family.takes_system:
        with pytest.raises(ChatTemplateError, match="system → user"):
            template.start([system("be brief"), user("hello")])
        return
    ids = appended(template, ["hello", "again"], ["hi"], first=[system("be brief")])
    fresh = full_render(template, [system("be brief"), user("hello"), assistant("hi"), user("again")])
    # Mistral's fresh render moves the system prompt to the last user message; the appended context leaves it
    # where it was.
    assert (ids == fresh) == (family.name != "mistral-nemo-instruct")
    assert template.decode(ids).count("be brief") == 1


def test_separator_and_end_of_turn_stand_exactly_once(template, family):
    response = template.respond("go")
    text = template.tokenizer.decode(template.extend(response, [user("next")]))
    assert response[-1] == special(template, family.end_of_turn) and response.count(response[-1]) == 1
    assert template.tokenizer.decode(template.extend([], [user("next")])) == family.end_of_turn + text
    header = template.tokenizer.decode(template.start([user("next")]))
    assert text.startswith(family.separator) and text.removeprefix(family.separator)
    assert header.endswith(text.removeprefix(family.separator))


@PROPERTY
@given(data=st.data())
def test_a_response_cut_by_length_is_closed_exactly_once(template, family, data):
    num_plain = min(special(template, token) for token in family.special_tokens)
    sampled = data.draw(st.lists(st.integers(0, num_plain - 1), max_size=20))
    end_of_turn = special(template, family.end_of_turn)
    closed_by_us = template.extend(sampled, [user("next")])
    closed_by_model = template.extend([*sampled, end_of_turn], [user("next")])
    assert closed_by_us == [end_of_turn, *closed_by_model]
    assert closed_by_model[:1] != [end_of_turn]


def test_another_stop_token_stays_and_the_turn_is_closed_as_the_template_does(template, family):
    if family.other_stop is None:
        pytest.skip("the end of text is the end of turn here")
    sampled = [*template.respond("go")[:-1], special(template, family.other_stop)]
    assert template.extend(sampled, [user("next")])[0] == special(template, family.end_of_turn)


def test_tails_repeat_neither_bos_nor_date_nor_default_system_prompt(template, family):
    tail = template.extend(template.respond("go"), [user("next")])
    text = template.tokenizer.decode(tail)
    assert family.bos_token is None or special(template, family.bos_token) not in tail
    assert not any(word in text for word in ("2024", "Alibaba", "system"))


def test_the_rendered_tail_does_not_depend_on_the_history(template):
    rendered = []

    class Spy:
        def __getattr__(self, name):
            return getattr(template.tokenizer, name)

        def apply_chat_template(self, messages, **kwargs):
            text = template.tokenizer.apply_chat_template(messages, **kwargs)
            rendered.append(len(text))
            return text

    spied = ChatTemplate(Spy())
    response = spied.respond("go")
    context = spied.start([user("x" * 2000)])
    spied.extend(response, [user("next")])
    costs = []
    for _ in range(5):
        rendered.clear()
        context += response + spied.extend(response, [user("next")])
        costs.append(sum(rendered))
    assert len(set(costs)) == 1 and costs[0] < 400


def test_stop_tokens_are_end_of_turn_end_of_text_and_the_generation_config_s(template, family):
    expected = {special(template, family.end_of_turn), special(template, family.eos_token)}
    assert set(template.stop_token_ids) == expected
    more = ChatTemplate(template.tokenizer, eos_token_ids=[3, special(template, family.eos_token)])
    assert set(more.stop_token_ids) == expected | {3} and len(more.stop_token_ids) == len(expected) + 1


def test_rewritten_history_is_detected_and_said_once(template, family, caplog):
    rewrites = family.name in ("qwen3", "mistral-nemo-instruct")
    fresh = ChatTemplate(template.tokenizer)
    assert fresh.rewrites_history == rewrites
    fresh.announce_rewrites()
    fresh.announce_rewrites()
    assert len(caplog.records) == rewrites


def test_text_that_contains_the_sentinel_or_special_looking_text_survives(template, family):
    tail = template.extend(template.respond("go"), [user(f"say {SENTINEL} twice: {SENTINEL}")])
    assert template.decode(tail).count(SENTINEL) == 2
    spelt = [template.tokenizer.convert_tokens_to_ids(c) for c in family.end_of_turn]
    assert template.decode(spelt) == family.end_of_turn
    assert template.extend(spelt, [user("next")])[0] == special(template, family.end_of_turn)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_qwen3_keeps_sampled_thinking_where_a_fresh_render_drops_it(template):
    thinking = "<think>\nleft is a hole\n</think>\n\nRight"
    ids = appended(template, ["where?", "and now?"], [thinking])
    fresh = full_render(template, [user("where?"), assistant(thinking), user("and now?")])
    text, fresh_text = (template.tokenizer.decode(x) for x in (ids, fresh))
    assert text.replace("<think>\nleft is a hole\n</think>\n\n", "") == fresh_text


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_qwen3_writes_no_think_block_into_a_tail_unless_thinking_is_off(template):
    assert "<think>" not in template.decode(template.extend([], [user("next")]))
    silent = ChatTemplate(template.tokenizer, template_kwargs={"enable_thinking": False})
    tail = silent.decode(silent.extend([], [user("next")]))
    assert tail.endswith("assistant\n<think>\n\n</think>\n\n") and tail.count("<think>") == 1


@pytest.mark.parametrize("family", ["qwen2.5-instruct", "qwen3"], indirect=True)
def test_tool_results_are_bridged_and_tools_are_announced_once(template):
    first = template.start([user("look!")], [TOOL])
    results = [{"role": "tool", "content": "a wall"}, {"role": "tool", "content": "a hole"}]
    tail = template.decode(template.extend(template.respond("I look"), results, [TOOL]))
    assert template.decode(first).count('"look"') == 1 and "look" not in tail
    assert tail == (
        "\nuser\n<tool_response>\na wall\n</tool_response>\n<tool_response>\na "
        "hole\n</tool_response>\nassistant\n"
    )


@pytest.mark.parametrize("family", ["llama3-control-flow"], indirect=True)
def test_llama_announces_tools_in_the_first_user_message_only(template):
    assert template.decode(template.start([user("look!")], [TOOL])).count('"look"') == 1
    assert "look" not in template.decode(template.extend(template.respond("I do"), [user("next")], [TOOL]))


@pytest.mark.parametrize("family", ["mistral-nemo-instruct"], indirect=True)
def test_mistral_announces_tools_before_each_user_message_and_not_before_tool_results(template):
    assert '"look"' in template.decode(template.extend(template.respond("I do"), [user("next")], [TOOL]))
    result = {"role": "tool", "content": "a wall", "tool_call_id": "abcdef123"}
    tail = template.decode(template.extend(template.respond("I do"), [result], [TOOL]))
    assert tail == '[TOOL_RESULTS]{"content": a wall, "call_id": "abcdef123"}[/TOOL_RESULTS]'


@pytest.mark.parametrize("family", ["gemma3-control-flow"], indirect=True)
def test_image_parts_go_through_the_template(template):
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    tail = template.extend(template.respond("go"), [user(parts)])
    assert tail.count(special(template, "<start_of_image>")) == 1


def test_a_template_that_takes_lists_of_parts_only_can_be_extended():
    parts_only = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text + '' }}{% "
        "endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(byte_tokenizer(chat_template=parts_only))
    tail = template.extend([], [user([{"type": "text", "text": "next"}])])
    assert (
        template.tokenizer.decode(tail)
        == "<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blanks_around_the_text_are_part_of_a_response():
    template = ChatTemplate(byte_tokenizer(("<s>", "</s>"), LLAMA2, bos_token="<s>", eos_token="</s>"))
    messages = [user("a"), assistant("b"), user("c")]
    assert template.tokenizer.decode(template.respond("b")) == " b </s>"
    assert template.tokenizer.decode(template.extend(template.respond("b")[:2], [user("c")])).startswith(
        " </s><s>[INST]"
    )
    assert appended(template, ["a", "c"], ["b"]) == full_render(template, messages)
    assert not template.rewrites_history


def test_a_template_without_end_of_turn_only_stops_at_the_end_of_text():
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "
    template = ChatTemplate(byte_tokenizer(("<|endoftext|>",), plain))
    end_of_text = template.tokenizer.eos_token_id
    assert template.stop_token_ids == (end_of_text,)
    # The special token in the user's text is not mistaken for the end of the turn.
    tail = template.extend([65, end_of_text], [user("<|endoftext|> next")])
    assert template.tokenizer.decode(tail) == "\nuser: <|endoftext|> next\nassistant: "


def test_what_can_not_be_rendered_is_refused_with_the_reason():
    tokenizer = byte_tokenizer(chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(tokenizer)
    forgetful = ChatTemplate(
        tokenizer, "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match="drops the text of assistant messages"):
        forgetful.extend([], [user("next")])
    with pytest.raises(ChatTemplateError, match="at least a user"):
        forgetful.start([])


@pytest.mark.parametrize("family", ["gemma-control-flow"], indirect=True)
def test_roles_that_a_template_refuses_are_named(template):
    with pytest.raises(ChatTemplateError, match="take turns"):
        template.extend(template.respond("go"), [user("one"), user("two")])


def test_decode_drops_special_tokens_only(template, family):
    ids = template.tokenizer("größer ☃", add_special_tokens=False)["input_ids"]
    assert template.decode([*ids, special(template, family.end_of_turn)]) == "größer ☃"
    assert template.decode(np.array(ids)) == "größer ☃"


def test_messages_that_are_more_than_a_role_and_a_text_are_rendered_anew():
    assert key_of([{"role": "tool", "content": "4"}]) == (("tool", "4"),)
    assert key_of([{"role": "tool", "content": "4", "tool_call_id": "a"}]) is None
    assert key_of([{"role": "user", "content": [{"type": "text", "text": "4"}]}]) is None
