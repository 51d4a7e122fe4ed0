"""A prompt that ends with an assistant's words is continued; one that holds the template's own tokens is
named."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from chat_messages import assistant, tool, user
from toy_tools import TOOL_CHATML

from turnwise.agents.single_turn_agent import RowAgentSettings, SingleTurnAgent
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import HermesParser
from turnwise.config import SFTConfig
from turnwise.data.rewards import messages_of
from turnwise.errors import ChatTemplateError
from turnwise.examine.demonstrations import encode_all
from turnwise.examine.examined import examine
from turnwise.examine.prompts import continued_problem, warn_of_turn_tokens
from turnwise.rollout.tasks import DataRow
from turnwise.testing.fakes import CHATML_TEMPLATE, ScriptedServer, byte_tokenizer
from turnwise.types import CallOptions, SamplingParams, Task

BEGUN = assistant("Let me solve this step by step.\n<think>")
ASKED = "<|im_start|>user\nWhere to?<|im_end|>\n<|im_start|>assistant\n"
OPENED = CHATML_TEMPLATE.replace("assistant\n", "assistant\n<think>\n")


def chatml(source: str = CHATML_TEMPLATE) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(chat_template=source))


@pytest.mark.parametrize(
    ("source", "words", "shown"),
    [
        (CHATML_TEMPLATE, BEGUN["content"], BEGUN["content"]),
        (CHATML_TEMPLATE, "Right, ", "Right, "),
        (CHATML_TEMPLATE, [{"type": "text", "text": "Right"}], "Right"),
        (CHATML_TEMPLATE, "", ""),
        (OPENED, "<think>\nSo", "<think>\nSo"),
        (OPENED, "<think>So", "<think>\nSo"),
        (OPENED, "So", "<think>\nSo"),
    ],
)
def test_the_words_stand_behind_the_header_and_the_turn_is_open(source, words, shown):
    template = chatml(source)
    ids = template.start([user("Where to?"), assistant(words)])
    opened = "<think>\n" if source == OPENED else ""
    assert template.decode(ids, skips_turn_tokens=False) == ASKED + opened + shown.removeprefix(opened)
    response = template.respond("</think>a")
    later = template.decode(template.extend(response, [user("b"), assistant(words)]), skips_turn_tokens=False)
    assert later.endswith("assistant\n" + opened + shown.removeprefix(opened))


def test_what_can_not_be_continued_is_refused():
    called = assistant("") | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ChatTemplateError, match="tool calls"):
        chatml().start([user("a"), called])
    with pytest.raises(ChatTemplateError, match="assistant's words"):
        chatml().start([BEGUN])
    assert continued_problem([user("a"), BEGUN]) == continued_problem([BEGUN, user("a")]) == ""
    assert "results" in continued_problem([user("a"), called])
    assert "nothing but" in continued_problem([BEGUN])


def test_a_row_is_continued_and_its_reward_sees_one_message():
    template = chatml()
    said = "6 × 7</think>42"
    server = ScriptedServer([template.respond(said)])
    task = Task("train/row-0", "data", "train", 0, payload={"prompt": [user("Where to?"), BEGUN]}, row=0)
    contexts = TokenContexts(template, server, 4000, "c")
    agent = SingleTurnAgent(RowAgentSettings())
    [trajectory] = asyncio.run(agent.run(task, 0, contexts, SamplingParams(max_new_tokens=100)))
    assert (
        template.decode(list(server.requests[0].prompt_ids), skips_turn_tokens=False)
        == ASKED + BEGUN["content"]
    )
    assert trajectory.turns[0].text == said, "the completion is what was sampled"
    assert messages_of(trajectory, "prompt") == [user("Where to?"), assistant(BEGUN["content"] + said)]


def test_calls_are_read_with_the_words_before_them():
    template = chatml(TOOL_CHATML)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    contexts = TokenContexts(
        template, ScriptedServer([template.respond(f"{call}hm</think>{call}")]), 4000, "c", HermesParser()
    )
    conversation = contexts(SamplingParams(max_new_tokens=200), tools=[tool("f", "Does it.")])
    reply = asyncio.run(conversation.generate([user("Where to?"), assistant("<think>")]))
    assert len(reply["tool_calls"]) == 1, "the call inside the thinking that the prompt has opened is none"
    assert conversation.turns[0].messages[-1]["content"] == f"<think>{call}hm</think>{call}"
    conversation.verify()


def test_a_continued_answer_is_one_message_where_the_tools_change():
    template = chatml(TOOL_CHATML)
    contexts = TokenContexts(
        template, ScriptedServer([template.respond("left"), template.respond("Done.")]), 4000, "c"
    )
    conversation = contexts(SamplingParams(max_new_tokens=200))

    async def converse():
        await conversation.generate([user("Where to?"), assistant("To the ")])
        await conversation.generate([user("And now?")], CallOptions(tools=[tool("g", "Does that.")]))

    asyncio.run(converse())
    conversation.verify()
    anew = template.decode(conversation.turns[1].prompt_ids.tolist(), skips_turn_tokens=False)
    assert "assistant\nTo the left<|im_end|>" in anew and anew.count("<|im_start|>assistant") == 2


@pytest.mark.parametrize(
    ("texts", "num_warnings"),
    [
        (["Where to?", "a < b", "<|im_start"], 0),
        (
            [
                "Where to?",
                "<|im_start|>user\nWhere to?<|im_end|>\n<|im_start|>assistant\n<think>",
                "<|im_end|>",
            ],
            1,
        ),
    ],
)
def test_a_prompt_that_holds_the_template_s_tokens_is_named_once(caplog, texts, num_warnings):
    rows = [
        (f"rows.jsonl, row {i}", DataRow("data", "single_turn_agent", {"prompt": text}))
        for i, text in enumerate(texts)
    ]
    with caplog.at_level(logging.WARNING):
        warn_of_turn_tokens(rows, "prompt", chatml(), "data.train_files")
    assert len(caplog.records) == num_warnings
    if num_warnings:
        assert all(word in caplog.text for word in ("rows.jsonl, row 1", "<|im_start|>", "2 of 3 rows"))


def test_a_demonstration_that_holds_the_template_s_tokens_is_named(caplog, tmp_path):
    rows = [{"messages": [user("Where to?"), assistant(text)]} for text in ("left", "right<|im_end|>")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = SFTConfig.model_validate(
        {"pretrain": "runs/model", "train_files": [str(file)], "sequence_length": 100}
    )
    with caplog.at_level(logging.WARNING):
        assert (
            len(encode_all(config, chatml(), "train_files", examine(config).demonstrations("train_files")))
            == 2
        )
    assert all(word in caplog.text for word in ("line 2", "<|im_end|>", "1 of 2 rows"))
