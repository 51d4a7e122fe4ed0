"""The text of an answer has every token that the model writes into its turn, and none that begins or ends a
turn."""

from __future__ import annotations

import asyncio

import pytest
from chat_messages import tool, user
from tokenizers import AddedToken
from toy_tools import TOOL_CHATML

from turnwise.assemble.rewards import response_reader
from turnwise.chat.conversation import TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.envs.parsing import parse_action
from turnwise.protocols.tools import ParsedResponse
from turnwise.testing.fakes import CHATML_TEMPLATE, ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams, Task, Trajectory

IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<search>", "</search>", "<think>", "</think>", "<tool_call>", "<|python_tag|>")


def made(is_special: bool, source: str = CHATML_TEMPLATE, pad: str = "<|endoftext|>") -> ChatTemplate:
    tokenizer = byte_tokenizer(IM, source, eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken(tag, special=is_special, normalized=False) for tag in TAGS])
    tokenizer.pad_token = pad
    return ChatTemplate(tokenizer)


def answered(template: ChatTemplate, text: str, **options):
    server = ScriptedServer([template.tokenizer.encode(text, add_special_tokens=False)])
    conversation = TokenConversation(
        template, server, "a", SamplingParams(max_new_tokens=400), 4000, **options
    )
    reply = asyncio.run(conversation.generate([user("?")]))
    return conversation.turns[0], reply


@pytest.mark.parametrize("is_special", [True, False])
def test_tags_stay_and_tokens_of_turns_go_whether_marked_special_or_not(is_special):
    template = made(is_special)
    said = "<think>so</think><search>6</search><tool_call><|python_tag|>"
    turn, reply = answered(template, f"{said}<|endoftext|><|im_start|><|im_end|>")
    assert turn.text == turn.messages[-1]["content"] == said
    assert reply["reasoning_content"] == "so" and f"<think>so</think>{reply['content']}" == said
    assert parse_action(turn.text, "<search>(.*?)</search>") == "6"
    episode = Trajectory(Task("t", "T", "train", 0), 0, [turn])
    assert response_reader(template)(episode) == said
    turn.text = f"{said}<|im_start|>"
    assert response_reader(template)(episode) == said, "a text that an agent set itself"


def test_a_header_s_thinking_tag_is_no_token_of_a_turn():
    template = made(True, CHATML_TEMPLATE.replace("assistant\n", "assistant\n<think>\n"))
    assert answered(template, "so</think>Right<|im_end|>")[0].text == "so</think>Right"
    assert set(template.turn_tokens) == set(IM)


def test_marks_around_answers_are_tokens_of_turns():
    source = (
        "{% for m in messages %}{{ '<T><U>' + m.content + '</T>' if m.role != 'assistant' else '<T><A><R>' + "
        "m.content + '</R></T>' }}{% endfor %}{% if add_generation_prompt %}<T><A>{% endif %}"
    )
    tokenizer = byte_tokenizer(
        ("<s>", "<T>", "<U>", "<A>", "<R>", "</R>", "<S>", "</T>"), source, bos_token="<s>"
    )
    template = ChatTemplate(tokenizer)
    assert template.turn_tokens == sorted(("<s>", "<T>", "<U>", "<A>", "<R>", "</R>", "</T>"))
    assert answered(template, "<R>go <S></R></T>")[0].text == "go <S>"


class Recording:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def parse(self, text, tools):
        self.texts.append(text)
        return ParsedResponse(text)


@pytest.mark.parametrize(
    ("reads_turn_tokens", "seen"), [(None, "a<|python_tag|>b"), (True, "a<|im_start|><|python_tag|>b")]
)
def test_a_parser_gets_tokens_of_turns_only_if_it_asks_for_them(reads_turn_tokens, seen):
    parser = Recording()
    if reads_turn_tokens is not None:
        parser.reads_turn_tokens = reads_turn_tokens
    answered(
        made(True, TOOL_CHATML),
        "a<|im_start|><|python_tag|>b<|im_end|>",
        tools=[tool("f", "Does it.")],
        parser=parser,
    )
    assert parser.texts == [seen]
