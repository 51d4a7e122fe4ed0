"""A conversation by text: the whole history is sent each time, and turns hold no tokens."""

from __future__ import annotations

import asyncio

from chat_messages import assistant, system, user

from turnwise.chat.conversation import TextAnswer, TextConversation
from turnwise.types import CallOptions, SamplingParams


def test_it_sends_the_history_with_the_smaller_budget_and_a_seed_of_the_turn():
    asked, shown = [], []

    async def complete(messages, sampling, tools=()):
        asked.append((list(messages), sampling))
        shown.append(tools)
        return TextAnswer(f"answer {len(asked)}", "length" if len(asked) == 2 else "stop", 0.5)

    async def talk():
        conversation = TextConversation(complete, SamplingParams(max_new_tokens=9, seed=4))
        options = CallOptions(5, temperature=0.5, tools=["schema"])
        first = await conversation.generate([system("Rules"), user("One")], options)
        await conversation.generate([user("Two")], CallOptions(50))
        await conversation.close()
        return conversation, first

    conversation, first = asyncio.run(talk())
    assert first == assistant("answer 1")
    assert [message["content"] for message in asked[1][0]] == ["Rules", "One", "answer 1", "Two"]
    assert [sampling.max_new_tokens for _, sampling in asked] == [5, 9]
    assert [sampling.temperature for _, sampling in asked] == [0.5, 1.0] and shown == [["schema"], ()]
    assert [turn.sampling for turn in conversation.turns] == [sampling for _, sampling in asked]
    assert len({sampling.seed for _, sampling in asked}) == 2
    assert [turn.text for turn in conversation.turns] == ["answer 1", "answer 2"]
    assert [turn.finish_reason for turn in conversation.turns] == ["stop", "length"]
    assert [turn.starts_context for turn in conversation.turns] == [True, False]
    assert all(turn.num_tokens == 0 for turn in conversation.turns)
    assert conversation.remaining_tokens() > 10**9
