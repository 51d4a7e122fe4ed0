"""The model of an episode as agents call it that keep their own messages, without an agent framework."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any

import pytest

from turnwise.agents.model_calls import ModelCalls, RequestSettings, SaidOnce
from turnwise.agents.react_agent import require_langgraph, warn_of_tracing, warn_of_version
from turnwise.agents.run_loop import RunLoop
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.message_content import Messages
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tree import Answer, ConversationTree
from turnwise.errors import BlockingFault, NotAvailableError, RequestError
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import CallOptions, SamplingParams

TEMPLATE = ChatTemplate(byte_tokenizer())
GO = [{"role": "user", "content": "go"}]


def calls_of(*responses: str, max_length: int = 256, **settings: Any) -> tuple[ModelCalls, ConversationTree]:
    server = ScriptedServer([TEMPLATE.respond(response) for response in responses])
    tree = ConversationTree(TEMPLATE, server, "t", SamplingParams(max_new_tokens=8), max_length)
    return ModelCalls(tree, RequestSettings(**settings), 8), tree


def test_calls_of_other_threads_and_loops_are_answered() -> None:
    async def play() -> list[int]:
        calls, _ = calls_of("a", "b", "c")
        in_thread = await asyncio.to_thread(calls.answer_blocking, GO, {}, ())
        elsewhere = await asyncio.to_thread(
            lambda: asyncio.run(calls.answer([*GO, in_thread.message, *GO], {}, ()))
        )
        with pytest.raises(BlockingFault, match="ainvoke"):
            calls.answer_blocking(GO, {}, ())
        return [in_thread.node, elsewhere.node, elsewhere.turn.parent]

    assert asyncio.run(play()) == [0, 1, 0]


def test_the_run_says_how_to_sample(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        calls, _ = calls_of()
        asked = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 4, "stop": "END", "tool_choice": "auto"}
        assert calls.options(asked) == CallOptions(max_new_tokens=4, stop=("END",))
        calls.options(asked | {"max_tokens": 99, "tool_choice": "any", "response_format": {}})
        assert calls.counts == {"ignored": 4, "unenforced": 2}
        warm, _ = calls_of(takes_temperature=True)
        assert warm.options(asked).temperature == 0.5 and warm.counts == {"ignored": 1}
        strict, _ = calls_of(is_strict=True)
        with pytest.raises(RequestError, match=r"tool_choice.*gateway\.strict"):
            strict.options({"tool_choice": "any"})

    asyncio.run(play())
    assert sum("its own temperature" in record.message for record in caplog.records) == 1


def test_a_cut_response_names_its_limit() -> None:
    async def limit(max_length: int) -> Any:
        calls, _ = calls_of("a" * 20, max_length=max_length)
        answer = await calls.answer(GO, {}, ())
        return calls.cut_by(answer.node)

    assert asyncio.run(limit(256)) == "max_new_tokens"
    assert asyncio.run(limit(len(TEMPLATE.start(GO)) + 3)) == "sequence_length"


def test_the_answers_of_a_tree_are_shown_to_its_contexts_first() -> None:
    server = ScriptedServer([TEMPLATE.respond("a"), TEMPLATE.respond("b")])
    events: list[Any] = []

    def on_commit(answer: Answer, messages: Messages) -> None:
        events.append((answer.turn.parent, [message["content"] for message in messages]))

    contexts = TokenContexts(TEMPLATE, server, 256, "e", on_commit=on_commit)

    async def play() -> None:
        tree = contexts.open_tree(
            SamplingParams(max_new_tokens=8), on_commit=lambda answer, _: events.append(answer.node)
        )
        first = await tree.answer(GO)
        await tree.answer([*GO, first.message, *GO])

    asyncio.run(play())
    text = GO[0]["content"]
    assert events == [(None, [text]), 0, (0, [text]), 1]


def test_a_loop_that_waits_for_itself_is_refused() -> None:
    async def play() -> None:
        run_loop = RunLoop()
        with pytest.raises(BlockingFault, match=r"a call.*advice"):
            run_loop.blocking(lambda: asyncio.sleep(0), "a call", "advice")

    asyncio.run(play())


def test_what_leaves_the_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = SaidOnce()
    warn_of_tracing(notes)
    assert not caplog.records
    monkeypatch.setenv("LANGSMITH_TRACING", "true")
    warn_of_tracing(notes)
    warn_of_tracing(notes)
    assert sum("LANGSMITH_TRACING" in record.message for record in caplog.records) == 1


def test_a_newer_library_than_was_tested_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.3.0")
    require_langgraph()
    warn_of_version(SaidOnce())
    assert "langgraph 1.3.0" in caplog.text


@pytest.mark.parametrize(("version", "words"), [(None, "langgraph"), ("1.1.9", "1.1.9")])
def test_a_library_that_is_missing_or_too_old_is_named(
    version: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(NotAvailableError, match=words):
        require_langgraph()
