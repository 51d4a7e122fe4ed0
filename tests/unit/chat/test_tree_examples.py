"""The worked examples in the design of the conversation tree, as they stand there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from chat_messages import system, tool, user
from toy_words import END, ids_of, word_template

from turnwise.batching.samples import build_samples
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import HermesParser
from turnwise.chat.tree import Answer, ConversationTree
from turnwise.errors import RequestError
from turnwise.models.tokenizer import CHAT_TEMPLATE
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import AS_OPENED, CallOptions, Message, SamplingParams, Task

SAMPLING = SamplingParams(max_new_tokens=8)
TASK = Task("t", "T", "train", 0)
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def messages_of(text: str) -> list[Message]:
    """Messages from a text such as `u go, a left, u again`."""
    messages = []
    for part in text.split(", "):
        letter, _, content = part.partition(" ")
        messages.append({"role": ROLES[letter], "content": content})
    return messages


class Row(NamedTuple):
    """One request of an example, and its turn: `parent` None starts a context."""

    request: str
    prompt: str
    response: str
    parent: int | None


class Example(NamedTuple):
    rows: Sequence[Row]
    trained: Sequence[Sequence[int]]
    contexts: Sequence[str] = ()


COMPACTED = "s sys, u go, a left, u again"
EXAMPLES = {
    "linear": Example(
        [
            Row("u go", "2 11 5 3", "12 5", None),
            Row("u go, a left, u again", "2 14 5 3", "13 5", 0),
        ],
        [[0, 1]],
        ["2 11 5 3 12 5 2 14 5 3 13 5"],
    ),
    "repeat": Example(
        [
            Row("u go", "2 11 5 3", "12 5", None),
            Row("u go", "2 11 5 3", "13 5", None),
            Row("u go, a right, u again", "2 14 5 3", "17 5", 1),
        ],
        [[0], [1, 2]],
        ["2 11 5 3 12 5", "2 11 5 3 13 5 2 14 5 3 17 5"],
    ),
    "twins": Example(
        [
            Row("u go", "2 11 5 3", "12 5", None),
            Row("u go", "2 11 5 3", "12 5", None),
            Row("u go, a left, u again", "2 14 5 3", "17 5", 1),
        ],
        [[0], [1, 2]],
    ),
    "fork": Example(
        [
            Row("u go", "2 11 5 3", "12 5", None),
            Row("u go, a left, u again", "2 14 5 3", "13 5", 0),
            Row("u go, a left, u do", "2 16 5 3", "17 5", 0),
        ],
        [[0, 1], [2]],
        ["2 11 5 3 12 5 2 14 5 3 13 5", "2 11 5 3 12 5 2 16 5 3 17 5"],
    ),
    "sub-agent": Example(
        [
            Row("s sys, u go", "1 10 5 2 11 5 3", "23 5", None),
            Row("u sub do", "2 15 16 5 3", "22 5", None),
            Row("s sys, u go, a call, u ok", "2 22 5 3", "17 5", 0),
        ],
        [[1], [0, 2]],
        ["2 15 16 5 3 22 5", "1 10 5 2 11 5 3 23 5 2 22 5 3 17 5"],
    ),
    "compaction": Example(
        [
            Row("s sys, u go", "1 10 5 2 11 5 3", "12 5", None),
            Row(COMPACTED, "2 14 5 3", "13 5", 0),
            Row(f"{COMPACTED}, a right, u sum", "2 18 5 3", "19 5", 1),
            Row("s sys, u s1, u again", "1 10 5 2 19 5 2 14 5 3", "17 5", None),
        ],
        [[0, 1, 2], [3]],
    ),
    "changed": Example(
        [
            Row("u go", "2 11 5 3", "12 5", None),
            Row("u go, a left, u again", "2 14 5 3", "13 5", 0),
            Row("u go, a blue, u again", "2 11 5 3 21 5 2 14 5 3", "17 5", None),
            Row("u go, a left, u again, a red, u again", "2 14 5 3 20 5 2 14 5 3", "22 5", 0),
        ],
        [[0, 1], [2], [3]],
    ),
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_design(name: str) -> None:
    example = EXAMPLES[name]
    server = ScriptedServer([numbers(row.response) for row in example.rows])
    tree = ConversationTree(word_template(), server, name, SAMPLING, 256)

    async def play() -> None:
        for row in example.rows:
            tree.deliver(await tree.answer(messages_of(row.request)))

    asyncio.run(play())
    for turn, row in zip(tree.turns, example.rows, strict=True):
        assert turn.prompt_ids.tolist() == numbers(row.prompt)
        assert turn.response_ids.tolist() == numbers(row.response)
        assert turn.starts_context == (row.parent is None) and turn.parent == row.parent
    tree.verify()
    samples = build_samples(tree.trajectory(TASK, 0))
    assert [[span.turn for span in sample.turn_spans] for sample in samples] == list(example.trained)
    if example.contexts:
        assert [sample.token_ids.tolist() for sample in samples] == list(map(numbers, example.contexts))


def test_both_branches_of_a_fork_may_be_asked_at_the_same_time() -> None:
    says = {"go": "left", "again": "right", "do": "done"}
    asked = {ids_of(word)[0]: ids_of(answer)[0] for word, answer in says.items()}
    server = ScriptedServer(lambda request: [asked[request.prompt_ids[-3]], END])
    tree = ConversationTree(word_template(), server, "fork", SAMPLING, 256)

    async def play() -> list[Answer]:
        await tree.answer(messages_of("u go"))
        branches = [tree.answer(messages_of(f"u go, a left, u {word}")) for word in ("again", "do")]
        return await asyncio.gather(*branches)

    answers = asyncio.run(play())
    assert [answer.message["content"] for answer in answers] == ["right", "done"]
    assert [turn.parent for turn in tree.turns] == [None, 0, 0]
    request_ids = [request.request_id for request in server.requests]
    assert request_ids[0] == request_ids[1] != request_ids[2], "a tip keeps its id, a branch has its own"


def test_what_no_client_has_got_is_not_trained() -> None:
    server = ScriptedServer([[12, 5], [13, 5], [17, 5]])
    tree = ConversationTree(word_template(), server, "t", SAMPLING, 256)

    async def play() -> None:
        first = await tree.answer(messages_of("u go"))
        tree.deliver(first)
        tree.deliver(await tree.answer(messages_of("u again"), is_trained=False))
        tree.drop(await tree.answer(messages_of("u go, a left, u do")))

    asyncio.run(play())
    trajectory = tree.trajectory(TASK, 0)
    assert [turn.is_trained for turn in trajectory.turns] == [True, False, False]
    samples = build_samples(trajectory)
    assert [sample.token_ids.tolist() for sample in samples] == [[2, 11, 5, 3, 12, 5]]
    assert samples[0].episode is None and trajectory.answer_turn == 0


ADD = tool("add", "Adds.", a="integer", b="integer")
OTHER = tool("find", "Finds.", x="string")
HEADED = "<think>hm</think>Let me see."
CALLS = "".join(
    f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    for arguments in ('{"b": 2, "a": 1}', '{"a": 3, "b": 4}')
)


def call(call_id: str, arguments: Any) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


FIRST, SECOND = '{"b": 2, "a": 1}', '{"a": 3, "b": 4}'


def sent(
    first: Any = FIRST, second: Any = SECOND, ids: tuple[str, str] = ("c0", "c1"), **fields: Any
) -> list[Message]:
    """What a client sends after the response, with the response."""
    calls = [call(ids[0], first), call(ids[1], second)]
    message = {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
        "tool_calls": calls,
        **fields,
    }
    return [message, result(ids[0], "3"), result(ids[1], "7")]


SYSTEM = system("Be brief.")
ASK = user("Add.")
SAME: dict[str, list[Message]] = {
    "all of it": [SYSTEM, ASK, *sent()],
    "other spaces and order": [SYSTEM, ASK, *sent('{"a":1,   "b":2}', {"b": 4, "a": 3})],
    "null fields": [SYSTEM, ASK, *sent(refusal=None, annotations=None, audio=None, function_call=None)],
    "developer": [{"role": "developer", "content": "Be brief."}, ASK, *sent()],
    "parts": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Add."}]}, *sent()],
    "named results": [SYSTEM, ASK, sent()[0], *({**it, "name": "add"} for it in sent()[1:])],
    "renamed ids": [SYSTEM, ASK, *sent(ids=("x", "y"))],
}
OMITTED: dict[str, list[Message]] = {
    "no reasoning": [SYSTEM, ASK, *sent(reasoning_content=None)],
    "null content": [SYSTEM, ASK, *sent(content=None, reasoning_content=None)],
}
FIRST_ONLY = sent(tool_calls=[call("c0", FIRST)])[:2]
DIFFERENT: dict[str, list[Message]] = {
    "one call": [SYSTEM, ASK, *FIRST_ONLY],
    "another argument": [SYSTEM, ASK, *sent('{"b": 9, "a": 1}')],
    "trimmed text": [SYSTEM, ASK, *sent(content="Let me")],
    "smolagents": [
        SYSTEM,
        ASK,
        {"role": "assistant", "content": f"Let me see. {CALLS}"},
        user("Results: 3, 7"),
    ],
}
FORK: dict[str, list[Message]] = {"left out": [SYSTEM, ASK, user("Tool call error")]}


def second_turn(
    messages: list[Message], match: Any = "omitted", tools: Sequence[Any] = (ADD,)
) -> tuple[ConversationTree, Answer]:
    """The answer to a request that follows the response with two calls."""
    template = ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)
    server = ScriptedServer([template.respond(HEADED + CALLS), template.respond("7")])
    tree = ConversationTree(
        template, server, "t", SamplingParams(max_new_tokens=400), 4000, parser=HermesParser(), match=match
    )

    async def play() -> Answer:
        await tree.answer([SYSTEM, ASK], tools=[ADD])
        return await tree.answer(messages, tools=tools)

    return tree, asyncio.run(play())


@pytest.mark.parametrize("match", ["omitted", "exact"])
@pytest.mark.parametrize("name", SAME)
def test_the_same_message_comes_back(name: str, match: str) -> None:
    tree, answer = second_turn(SAME[name], match)
    assert tree.turns[1].parent == 0 and answer.message["content"] == "7"
    shown = second_turn(SAME["all of it"])[0].turns[1].prompt_ids.tolist()
    assert tree.turns[1].prompt_ids.tolist() == shown, "what is no part of a key changes no token"


@pytest.mark.parametrize("name", OMITTED)
def test_what_a_client_leaves_out_starts_a_context_only_under_exact(name: str) -> None:
    assert second_turn(OMITTED[name])[0].turns[1].parent == 0
    assert second_turn(OMITTED[name], "exact")[0].turns[1].starts_context


@pytest.mark.parametrize("name", [*DIFFERENT, *FORK])
def test_what_differs_is_a_branch_from_the_deepest_node_before_it(name: str) -> None:
    tree, _ = second_turn((DIFFERENT | FORK)[name])
    assert tree.turns[1].starts_context, "nothing sampled comes before the difference"
    assert tree.counts["contexts/changed"] == 1


def test_other_tools_are_another_root() -> None:
    tree, _ = second_turn(SAME["all of it"], tools=[OTHER])
    assert tree.turns[1].starts_context and tree.counts["contexts/tools"] == 1
    template = ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)
    shown = template.decode(tree.turns[1].prompt_ids.tolist())
    assert shown.partition("Let me see.")[2].count("<tool_call>") == 2


def test_results_in_another_order_are_another_message() -> None:
    template = ChatTemplate(byte_tokenizer(), CHAT_TEMPLATE)
    script = [HEADED + CALLS, "7", "So 10.", "What?"]
    server = ScriptedServer(list(map(template.respond, script)))
    tree = ConversationTree(
        template, server, "t", SamplingParams(max_new_tokens=400), 4000, parser=HermesParser()
    )
    message, one, two = sent()
    answered = {"role": "assistant", "content": "7"}

    async def play() -> None:
        await tree.answer([SYSTEM, ASK], tools=[ADD])
        await tree.answer([SYSTEM, ASK, message, one, two], tools=[ADD])
        await tree.answer([SYSTEM, ASK, message, one, two, answered, user("And?")], tools=[ADD])
        await tree.answer([SYSTEM, ASK, message, two, one, answered, user("And?")], tools=[ADD])

    asyncio.run(play())
    assert [turn.parent for turn in tree.turns] == [None, 0, 1, 0]


BAD: dict[str, Callable[[], Any]] = {
    "no messages": lambda: [],
    "ends with an assistant's": lambda: [ASK, sent()[0]],
    "a result without a call": lambda: [ASK, result("c9", "3")],
    "two results for one call": lambda: [ASK, *sent(), result("c0", "4")],
    "an image": lambda: [{"role": "user", "content": [{"type": "image_url"}]}],
    "another role": lambda: [{"role": "judge", "content": ""}],
    "no message": lambda: ["Hi"],
    "a number": lambda: [{"role": "user", "content": 4}],
}


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_cannot_be_read_is_refused_and_leaves_no_trace(name: str) -> None:
    tree = ConversationTree(word_template(), ScriptedServer([]), "t", SAMPLING, 256)
    with pytest.raises(RequestError) as fault:
        asyncio.run(tree.answer(BAD[name]()))
    assert fault.value.code == "invalid_request" and not tree.turns


def test_limits_have_codes_and_are_the_episode_s_outcome_unless_the_client_goes_on() -> None:
    server = ScriptedServer([[12, 5], [13, 5]])
    tree = ConversationTree(word_template(), server, "t", SAMPLING, 12, max_turns=2)

    async def play() -> None:
        tree.deliver(await tree.answer(messages_of("u go")))
        with pytest.raises(RequestError) as fault:
            await tree.answer(messages_of("u go, a left, u again again again"))
        assert fault.value.code == "context_length_exceeded"
        assert tree.trajectory(TASK, 0).limit == "sequence_length"
        await tree.answer(messages_of("u go, a left, u again"))
        assert tree.trajectory(TASK, 0).limit is None
        with pytest.raises(RequestError) as fault:
            await tree.answer(messages_of("u do"))
        assert fault.value.code == "turn_limit" and tree.trajectory(TASK, 0).status == "truncated"

    asyncio.run(play())


def test_a_stop_string_is_cut_from_the_text_and_the_next_request_matches() -> None:
    server = ScriptedServer([[12, 13, 5], [17, 5]])
    tree = ConversationTree(word_template(), server, "t", SAMPLING, 256)

    async def play() -> Message:
        first = await tree.answer(messages_of("u go"), CallOptions(stop=(" right",)))
        await tree.answer([user("go"), first.message, user("again")], AS_OPENED)
        return first.message

    assert asyncio.run(play())["content"] == "left"
    assert tree.turns[1].parent == 0 and tree.turns[0].response_ids.tolist() == [12, 13, 5]
