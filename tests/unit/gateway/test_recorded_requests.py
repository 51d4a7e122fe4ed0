"""What real clients send, read by the dialects and replayed against a tree: the contexts of the tables in the
design come out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import HermesParser
from turnwise.chat.tree import ConversationTree
from turnwise.gateway.dialects import COUNTERS, DIALECTS
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.spec import MatchRule
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import SamplingParams

FILE = Path(__file__).parents[2] / "data" / "gateway_requests.json"
CASES: dict[str, Sequence[Mapping[str, Any]]] = {
    f"{case['client']}-{case['case']}": case["requests"] for case in json.loads(FILE.read_text())
}
PARENTS: dict[str, list[int | None]] = {
    "agents-0": [None, 0, 1],
    "agents-2": [None, None, 0, None],
    "agents-5": [None, 0],
    # A call that can't be read stays text here, and this client has sent it back as a call.
    "agents-6": [None, None],
    "agents-8": [None, 0, 1],
    "agents-10": [None, 0, 1],
    "agents-11": [None, 0, 1],
    "agents-12": [None, None, 0, None],
    "anthropic-0": [None, 0, 1],
    "claude-1": [None, 0, 1],
    # Two sub-agents at once, one of which calls a tool.
    "claude-2": [None, None, None, 1, 0],
    "claude-3": [None, 0, 1],
    "codex-1": [None, 0, 1],
    # Its sub-agent has one tool less.
    "codex-2": [None, 0, None],
    "codex-3": [None, 0, 1],
    "crew-0": [None, 0],
    "deep-0": [None, None, None, 0],
    "lc-0": [None, 0, 1],
    "lc-2": [None, 0, 1],
    "mini-0": [None, 0, 0],
    "openai-0": [None, 0],
    "openai-15": [None, 0, 1, 2],
    "pyd-0": [None, 0],
    "pyd-2": [None, None],
    "pyd-3": [None, 0, 1],
    "pyd-4": [None, None],
    "smol-0": [None, None],
    "smol-1": [None, None],
}
"""The turn that each turn continues; a case that isn't here has one turn."""
EXACT: dict[str, list[int | None]] = {
    # These leave out the thinking, so only what was sampled without any is continued.
    "agents-0": [None, None, 1],
    "lc-0": [None, None, 1],
    "lc-2": [None, None, 1],
    "crew-0": [None, None],
}
"""What differs under `match: exact`."""


def sampled_text(reply: Mapping[str, Any]) -> str:
    """What the model says for a recorded reply."""
    calls = []
    for name, arguments in reply.get("calls") or ():
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        calls.append(f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>')
    thinking = ""
    if reply.get("reasoning"):
        thinking = f"<think>{reply['reasoning']}</think>"
    return thinking + (reply.get("content") or "") + "".join(calls)


@cache
def byte_template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)


def replayed(name: str, match: MatchRule = "omitted") -> ConversationTree:
    """The tree after the requests of a case. A reply that is null was lost with its connection."""
    requests = [request for request in CASES[name] if request["path"] in DIALECTS]
    template = byte_template()
    replies = [template.respond(sampled_text(request["reply"] or {"content": "x"})) for request in requests]
    sampling = SamplingParams(max_new_tokens=1000)
    tree = ConversationTree(
        template, ScriptedServer(replies), name, sampling, 200_000, parser=HermesParser(), match=match
    )

    async def play() -> None:
        for request in requests:
            read = DIALECTS[request["path"]].read(request["body"])
            # A token is a byte here, so the clients' budgets are too small.
            options = replace(read.options, max_new_tokens=None)
            answer = await tree.answer(read.messages, options, read.tools)
            if request["reply"] is None:
                tree.drop(answer)
            else:
                tree.deliver(answer)

    asyncio.run(play())
    tree.verify()
    return tree


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_conversation_has_the_contexts_of_the_design(name: str) -> None:
    tree = replayed(name)
    assert [turn.parent for turn in tree.turns] == PARENTS.get(name, [None])
    if any(request.get("reply", "") is None for request in CASES[name]):
        assert tree.counts["replayed"] == len(CASES[name]) - 1, "what no client has got is not sampled anew"


@pytest.mark.parametrize("name", PARENTS)
def test_what_a_client_leaves_out_starts_contexts_under_exact(name: str) -> None:
    tree = replayed(name, "exact")
    assert [turn.parent for turn in tree.turns] == EXACT.get(name, PARENTS[name])


def test_each_dialect_has_five_conversations() -> None:
    for path in DIALECTS:
        assert sum(requests[0]["path"] == path for requests in CASES.values()) >= 5


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("claude")])
def test_the_billing_line_is_cut_from_every_request(name: str) -> None:
    for request in CASES[name]:
        read = DIALECTS[request["path"]].read(request["body"])
        assert read.removed and "billing" not in read.messages[0]["content"]


def test_a_count_of_tokens_is_read_as_a_request() -> None:
    [request] = [request for request in CASES["anthropic-0"] if request["path"] in COUNTERS]
    read = COUNTERS[request["path"]].read(request["body"])
    assert [message["role"] for message in read.messages] == ["user"]


def test_smolagents_contexts_are_its_steps_and_codex_s_tools_are_another_root() -> None:
    assert replayed("smol-0").counts["contexts/changed"] == 1
    assert replayed("codex-2").counts["contexts/tools"] == 1
