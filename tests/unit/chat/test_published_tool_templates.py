"""Conversations with calls and results in the published templates of the families whose calls are read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from chat_messages import assistant, tool, user

from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.errors import ChatTemplateError
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import CallOptions, SamplingParams

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
SCHEMA = tool("look", "Looks a thing up.", x="integer")
OTHER = tool("find", "Finds a thing.", y="string")


@dataclass(frozen=True)
class Family:
    """A template, a call as its family writes it, and what the template writes between that call and the next
    response."""

    name: str
    special: tuple[str, ...]
    eos: str
    call: str
    end: str
    around: tuple[str, str]
    """The text before and after a result that says "42"."""
    other_ends: tuple[str, ...] = ()

    @property
    def template(self) -> ChatTemplate:
        tokenizer = byte_tokenizer(self.special)
        tokenizer.eos_token = self.eos
        ends = tokenizer.convert_tokens_to_ids(list(self.other_ends))
        return ChatTemplate(tokenizer, (FOLDER / f"{self.name}.jinja").read_text(), eos_token_ids=ends)


FAMILIES = (
    Family(
        "gpt-oss",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        "<|return|>",
        ' to=functions.look<|channel|>commentary json<|message|>{"x": 6}',
        "<|call|>",
        (
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"',
            '"<|end|><|start|>assistant',
        ),
        ("<|call|>",),
    ),
    Family(
        "deepseek-v3.1-tools",
        (
            *(
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<think>",
                "</think>",
            ),
            *(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
            ),
            *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"x": 6}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜end▁of▁sentence｜>",
        ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    Family(
        "qwen3.5",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
        "<|im_end|>",
        "<tool_call>\n<function=look>\n<parameter=x>\n6\n</parameter>\n</function>\n</tool_call>",
        "<|im_end|>",
        (
            "\n<|im_start|>user\n<tool_response>\n",
            "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
    ),
    Family(
        "llama3-control-flow",
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        "<|eot_id|>",
        '{"name": "look", "parameters": {"x": 6}}',
        "<|eot_id|>",
        (
            '<|start_header_id|>ipython<|end_header_id|>\n\n"',
            '"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        ),
    ),
)


@pytest.mark.parametrize("is_cut", [False, True], ids=["ended", "cut"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_result_stands_behind_a_call_as_the_template_writes_it(family: Family, is_cut: bool) -> None:
    template = family.template
    said = template.tokenizer.encode(family.call + family.end * (not is_cut))
    server = ScriptedServer([said, template.stop_token_ids[:1]])
    contexts = TokenContexts(template, server, 8000, "c", find_parser(None, template))
    conversation = contexts(SamplingParams(max_new_tokens=len(said)), tools=[SCHEMA])

    async def converse() -> list[object]:
        reply = await conversation.generate([user("6 times 7?")])
        assert reply is not None and reply["call_errors"] == []
        result = {
            "role": "tool",
            "name": "look",
            "tool_call_id": reply["tool_calls"][0]["id"],
            "content": "42",
        }
        await conversation.generate([result])
        return [call["function"] for call in reply["tool_calls"]]

    assert asyncio.run(converse()) == [{"name": "look", "arguments": {"x": 6}}]
    first, second = conversation.turns
    assert "Looks a thing up." in template.decode(first.prompt_ids.tolist(), skips_turn_tokens=False)
    before, after = family.around
    shown = template.decode(second.prompt_ids.tolist(), skips_turn_tokens=False)
    assert shown == family.end * is_cut + before + "42" + after
    contexts.verify()


def test_what_a_template_leaves_out_of_a_schema_is_named() -> None:
    inner = {"type": "object", "properties": {"deep": {"type": "boolean", "description": "Looks below."}}}
    with pytest.raises(ChatTemplateError, match=r"the schema of a tool \(its description 'Looks below.'\)"):
        FAMILIES[0].template.start([user("Hi")], [tool("look", "Looks.", flags=inner)])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_reply_without_calls_is_shown_again_where_the_tools_change(family: Family) -> None:
    template = family.template
    server = ScriptedServer([template.tokenizer.encode("Hello." + family.eos), template.stop_token_ids[:1]])
    contexts = TokenContexts(template, server, 8000, "c", find_parser(None, template))
    conversation = contexts(SamplingParams(max_new_tokens=40), tools=[SCHEMA])

    async def converse() -> object:
        reply = await conversation.generate([user("Hi")])
        await conversation.generate([user("And now?")], CallOptions(tools=[OTHER]))
        return reply

    assert asyncio.run(converse()) == assistant("Hello.") | {"tool_calls": [], "call_errors": []}
    shown = template.decode(conversation.turns[1].prompt_ids.tolist(), skips_turn_tokens=False)
    assert all(text in shown for text in ("Finds a thing.", "Hi", "Hello.", "And now?"))
    examples = [user("Hi"), assistant("Hello.") | {"tool_calls": None}, user("And now?")]
    assert "Hello." in template.decode(template.start(examples, [SCHEMA]))
