"""Requests that were recorded go into a tree again and make the same turns; a changed record is found."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_messages import system, user
from toy_tools import TOOL_CHATML, Notebook
from toy_words import ids_of, word_template

from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.errors import DataError, RolloutError
from turnwise.rollout.journal import Journal, read_journal
from turnwise.rollout.recorded_tree import replay_tree
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.types import CallOptions, Group, Message, SamplingParams, Task, Trajectory

SAMPLING = SamplingParams(max_new_tokens=4)
TASK = Task("train/T/0", "T", "train", 0)
TEMPLATE = word_template()
SYS = system("sys")
GO = user("go")


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


REQUESTS: list[tuple[list[Message], dict[str, Any]]] = [
    ([SYS, GO], {}),
    ([SYS, GO, assistant("left"), user("again")], {}),
    ([SYS, GO, assistant("left"), user("do")], {}),  # a fork
    ([GO], {}),  # another root
    ([SYS, GO], {}),  # a repeat
    ([SYS, GO, assistant("left"), user("again"), assistant("right"), user("sum")], {}),
    ([user("sub")], {"options": CallOptions(stop=("red",))}),
    ([user("sub"), assistant("blue "), user("again")], {}),
]
REPLIES = ["left", "right", "done", "ok", "blue", "done", "blue red", "ok"]


def contexts(server: Any, name: str) -> TokenContexts:
    return TokenContexts(TEMPLATE, server, 256, name)


async def play(is_delivered: bool = True) -> Trajectory:
    server = ScriptedServer([ids_of(f"{reply} <e>") for reply in REPLIES])
    tree = contexts(server, "episode").open_tree(SAMPLING)
    for messages, arguments in REQUESTS:
        answer = await tree.answer(messages, **arguments)
        if is_delivered:
            tree.deliver(answer)
        else:
            tree.drop(answer)
    return tree.trajectory(TASK, 0)


def recorded(tmp_path: Path, is_delivered: bool = True) -> Trajectory:
    return written(tmp_path, asyncio.run(play(is_delivered)))


def written(tmp_path: Path, trajectory: Trajectory) -> Trajectory:
    """The trajectory as a file gives it back."""
    journal = Journal(tmp_path / "rollouts.jsonl")
    journal.append(0, [Group(TASK, [trajectory], 0)])
    journal.close()
    [(_, again)] = read_journal(tmp_path / "rollouts.jsonl")
    return again


def replay(trajectory: Trajectory) -> None:
    asyncio.run(replay_tree(trajectory, contexts, SAMPLING, "omitted"))


@pytest.mark.parametrize("is_delivered", [True, False])
def test_recorded_requests_make_the_recorded_turns(tmp_path: Path, is_delivered: bool) -> None:
    trajectory = recorded(tmp_path, is_delivered)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 0, None, None, 1, None, 6]
    replay(trajectory)


def test_tools_and_their_results_are_recorded(tmp_path: Path) -> None:
    template = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
    parser = find_parser("hermes", template)

    def with_tools(server: Any, name: str) -> TokenContexts:
        return TokenContexts(template, server, 4096, name, parser)

    call = '<tool_call>{"name": "note", "arguments": {"text": "x"}}</tool_call>'
    schemas = [Notebook().schema]

    async def play() -> Trajectory:
        server = ScriptedServer(map(template.respond, [call, "done"]))
        tree = with_tools(server, "episode").open_tree(SamplingParams(max_new_tokens=256))
        first = await tree.answer([GO], tools=schemas)
        [sampled] = first.message["tool_calls"]
        result = {"role": "tool", "tool_call_id": sampled["id"], "content": "x"}
        for answer in (first, await tree.answer([GO, first.message, result], tools=schemas)):
            tree.deliver(answer)
        return tree.trajectory(TASK, 0)

    trajectory = written(tmp_path, asyncio.run(play()))
    assert trajectory.turns[1].parent == 0
    asyncio.run(replay_tree(trajectory, with_tools, SamplingParams(max_new_tokens=256), "omitted"))


def test_a_changed_message_is_the_first_difference(tmp_path: Path) -> None:
    trajectory = recorded(tmp_path)
    turn = trajectory.turns[2]
    turn.messages = [user("again"), *turn.messages[1:]]
    with pytest.raises(RolloutError, match="turn 3"):
        replay(trajectory)


def test_a_file_without_messages_is_refused(tmp_path: Path) -> None:
    trajectory = recorded(tmp_path)
    for turn in trajectory.turns:
        turn.messages = ()
    with pytest.raises(DataError, match="messages"):
        replay(trajectory)


def test_twins_that_are_not_trained_are_replayed(tmp_path: Path) -> None:
    greedy = replace(SAMPLING, do_sample=False)

    async def twins() -> Trajectory:
        server = ScriptedServer([ids_of("left <e>"), ids_of("left <e>")])
        tree = contexts(server, "episode").open_tree(greedy)
        for _ in range(2):
            tree.deliver(await tree.answer([GO]))
        return tree.trajectory(TASK, 0)

    trajectory = written(tmp_path, asyncio.run(twins()))
    assert [turn.is_trained for turn in trajectory.turns] == [False, False]
    asyncio.run(replay_tree(trajectory, contexts, greedy, "omitted"))
