"""What the embedded engine computes for a tree of requests: what is new, and a shared prefix once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from chat_messages import user
from toy_model import toy_model

from turnwise.chat.template import ChatTemplate
from turnwise.chat.tree import Answer, ConversationTree
from turnwise.inference.embedded.runner import PackedStep
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.testing.fakes import byte_tokenizer
from turnwise.types import SamplingParams

LONG = "the agent reads a file and writes what it has found there " * 12
MARGIN = 1.05


class Bench:
    """A tree over a small model, and the number of tokens of all its forward passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        template = ChatTemplate(byte_tokenizer())
        model = toy_model(0, vocab_size=len(template.tokenizer), max_position_embeddings=2048)
        self.server = EmbeddedServer(model, decode=template.decode)
        self.tree = ConversationTree(template, self.server, "t", SamplingParams(12, seed=3), 2048)
        self.num_computed = 0
        forward = self.server._runner.forward

        def counted(step: PackedStep) -> Any:
            self.num_computed += int(step.counts.sum())
            return forward(step)

        monkeypatch.setattr(self.server._runner, "forward", counted)

    async def ask(self, *requests: Sequence[Any]) -> list[Answer]:
        """The answers to requests that come at once."""
        answers = await asyncio.gather(*map(self.tree.answer, requests))
        for answer in answers:
            self.tree.deliver(answer)
        return answers

    @property
    def num_new(self) -> int:
        """Number of tokens that the turns added to their contexts."""
        return sum(turn.num_tokens for turn in self.tree.turns)


async def test_a_linear_history_costs_what_is_new_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    messages: list[Any] = []
    for number in range(6):
        messages.append(user(f"{number} {LONG[:200]}"))
        [answer] = await bench.ask(messages)
        messages.append(answer.message)
    await bench.server.close()
    assert [turn.parent for turn in bench.tree.turns] == [None, 0, 1, 2, 3, 4]
    assert bench.num_new / MARGIN <= bench.num_computed <= MARGIN * bench.num_new


async def test_branches_at_once_share_what_comes_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    [first] = await bench.ask([user(LONG)])
    await bench.ask(*([user(LONG), first.message, user(f"{number} again")] for number in range(4)))
    await bench.server.close()
    assert [turn.parent for turn in bench.tree.turns] == [None, 0, 0, 0, 0]
    assert bench.num_computed <= MARGIN * bench.num_new


async def test_equal_requests_at_once_share_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    answers = await bench.ask(*([user(LONG)] for _ in range(4)))
    await bench.server.close()
    num_prompt = len(answers[0].turn.prompt_ids)
    num_sampled = sum(len(turn.response_ids) for turn in bench.tree.turns)
    assert all(turn.starts_context for turn in bench.tree.turns)
    assert bench.num_computed <= MARGIN * (num_prompt + num_sampled)
