"""Demonstrations have the ids of a rollout in which the model said the same, and teach what was sampled
there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from chat_messages import assistant, message, tool, user
from hypothesis import HealthCheck, given, settings

from turnwise.chat.conversation import TokenConversation
from turnwise.chat.demonstration import check_demonstration, encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.errors import ChatTemplateError, DataError
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams

PROPERTY = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(codec="utf-8"), max_size=15)


@PROPERTY
@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_ids_and_mask_are_those_of_a_rollout(template, pairs):
    sample = encode_demonstration(
        template, [m for asked, said in pairs for m in (user(asked), assistant(said))]
    )

    server = ScriptedServer([template.respond(said) for _, said in pairs])
    conversation = TokenConversation(template, server, "a", SamplingParams(max_new_tokens=1000), 100_000)

    async def play():
        for asked, _ in pairs:
            await conversation.generate([user(asked)])

    asyncio.run(play())
    ids = [i for turn in conversation.turns for i in (*turn.prompt_ids, *turn.response_ids)]
    mask = [
        is_sampled
        for t in conversation.turns
        for is_sampled in [False] * len(t.prompt_ids) + [True] * len(t.response_ids)
    ]
    assert sample.token_ids.tolist() == ids
    assert sample.response_mask.tolist() == mask
    spans = [slice(span.start, span.stop) for span in sample.turn_spans]
    assert [sample.token_ids[span].tolist() for span in spans] == [
        t.response_ids.tolist() for t in conversation.turns
    ]
    assert not sample.rollout_logprobs.any() and len(sample.rollout_logprobs) == len(ids)


def test_text_and_end_of_turn_are_learnt_and_nothing_else(template, family):
    sample = encode_demonstration(
        template, [user("where?"), assistant("Right"), user("and now?"), assistant("Left")]
    )
    learnt = template.tokenizer.decode(sample.token_ids[sample.response_mask])
    assert learnt == f"Right{family.end_of_turn}Left{family.end_of_turn}"
    assert sample.response_mask[-1] and sample.token_ids.dtype == np.int64


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no assistant message"),
        ([user("a")], "no assistant message"),
        ([assistant("a")], "message 0 is an assistant's at the start"),
        ([user("a"), assistant("b"), assistant("c")], "message 2 is an assistant's after another"),
        ([user("a"), message("oracle", "b")], "'oracle'; allowed: system, user, tool, assistant"),
        ([user("a"), assistant("b"), user("c")], "after the last assistant message"),
        ([user("a"), assistant(None)], "content of type NoneType"),
        ([user("a"), {**assistant("b"), "thinking": "hm"}], "the keys thinking"),
    ],
)
def test_conversations_that_teach_nothing_or_something_else_are_refused(messages, complaint):
    with pytest.raises(DataError, match=complaint):
        encode_demonstration(ChatTemplate(byte_tokenizer()), messages)


TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
ADD = tool("add", "Adds two numbers.", a="integer", b="integer")


def call(a, b, number=0):
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": a, "b": b}},
    }


def result(text, number=0):
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05d}", "content": text}


@pytest.mark.parametrize("name", ["qwen2.5-instruct", "qwen3", "mistral-nemo-instruct", "made here"])
def test_calls_are_taught_as_the_template_writes_them_and_read_again(name):
    text = CHAT_TEMPLATE if name == "made here" else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(byte_tokenizer(), text)
    parser = find_parser(None, template)
    asked = assistant(None) | {"tool_calls": [call(3, 4), call(5, 6, 1)]}
    messages = [user("3 + 4, 5 + 6?"), asked, result("7"), result("11", 1), assistant("7 and 11")]
    sample = encode_demonstration(template, messages, [ADD])
    taught = [sample.token_ids[span.start : span.stop].tolist() for span in sample.turn_spans]
    said = template.decode(taught[0], skips_turn_tokens=False)
    read = [(c.name, c.arguments) for c in parser.parse(said, [ADD]).tool_calls]
    assert read == [("add", {"a": 3, "b": 4}), ("add", {"a": 5, "b": 6})]
    shown = template.decode(sample.token_ids[~sample.response_mask].tolist())
    assert "Adds two numbers." in shown and "11" in shown and "11" not in said

    async def play():
        server, sampling = ScriptedServer(taught), SamplingParams(max_new_tokens=400)
        conversation = TokenConversation(template, server, "x", sampling, 4096, tools=[ADD], parser=parser)
        reply = await conversation.generate(messages[:1])
        await conversation.generate(messages[2:4])
        conversation.verify()
        return reply, [ids for turn in conversation.turns for ids in (turn.prompt_ids, turn.response_ids)]

    reply, ids = asyncio.run(play())
    assert [entry["function"] for entry in reply["tool_calls"]] == [
        entry["function"] for entry in asked["tool_calls"]
    ]
    assert np.array_equal(np.concatenate(ids), sample.token_ids), (
        "the demonstration has the ids of the rollout"
    )


@pytest.mark.parametrize("arguments", [{}, "{}"])
def test_a_call_without_arguments_is_taught(arguments):
    template = ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)
    asked = assistant(None) | {
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    }
    sample = encode_demonstration(template, [user("Add."), asked, result("0"), assistant("0")], [ADD])
    said = template.decode(
        sample.token_ids[slice(sample.turn_spans[0].start, sample.turn_spans[0].stop)].tolist()
    )
    assert '"add"' in said


def test_a_template_that_shows_no_calls_is_refused():
    with pytest.raises(ChatTemplateError, match="doesn't show a tool call"):
        encode_demonstration(
            ChatTemplate(byte_tokenizer()), [user("a"), assistant("") | {"tool_calls": [call(1, 2)]}]
        )


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"loss_mask": 0.0}, {"trainable": False}, {"train": False}, {"loss": False}]
)
@pytest.mark.parametrize("other", [{}, {"weight": 1}, {"train": None}])
def test_an_answer_that_is_marked_as_context_is_shown_and_not_trained(flag, other):
    template = ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)
    messages = [user("a"), assistant("Wrong"), user("b"), assistant("Right")]
    marked = [user("a"), assistant("Wrong") | flag, user("b") | {"weight": 0}, assistant("Right") | other]
    plain, sample = encode_demonstration(template, messages), encode_demonstration(template, marked)
    assert sample.token_ids.tolist() == plain.token_ids.tolist()
    learnt = template.decode(sample.token_ids[sample.response_mask].tolist())
    assert "Right" in learnt and "Wrong" not in learnt and len(sample.turn_spans) == 1


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (assistant("b") | {"weight": 0.5}, "message 1 has `weight` '0.5'"),
        (assistant("b") | {"loss_mask": [1, 0]}, "`loss_mask` .* of type list"),
        (assistant("b") | {"train": "false"}, "`train` 'false' of type str"),
        (assistant("b") | {"weight": float("nan")}, "`weight` 'nan'"),
        (assistant("b") | {"weight": 0}, "only context"),
        (assistant("b") | {"thinking": ""}, "the keys thinking"),
        (assistant("b") | {"mask": 0}, "the keys mask"),
    ],
)
def test_flags_that_are_no_flags_are_refused(message, complaint):
    with pytest.raises(DataError, match=complaint):
        check_demonstration([user("a"), message])


def test_only_answers_can_be_trained_and_null_or_an_empty_list_says_nothing():
    with pytest.raises(DataError, match="message 0 has `weight` 1 and the role 'user'"):
        check_demonstration([user("a") | {"weight": 1}, assistant("b")])
    with pytest.raises(DataError, match="message 0 has the keys images"):
        check_demonstration([user("a") | {"images": ["x"]}, assistant("b")])
    assert check_demonstration(
        [user("a") | {"images": []}, assistant("b") | {"refusal": None, "annotations": []}]
    )
    assert not check_demonstration([user("a"), assistant(" ")])
