"""The observer of an episode: it hears everything in order, live or from a record, nested or not, and changes
nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from toy_envs import IdentityEnv
from toy_tools import TOOL_CHATML, Notebook

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.foreign_text import OverForeignText
from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgent, ToolAgentLimits
from turnwise.chat.contexts import TokenContexts, opens_trees
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser
from turnwise.envs.recording import ObservedEnv
from turnwise.errors import ConfigError, ServerError
from turnwise.protocols import AgentLoop, SilentObserver
from turnwise.rollout.observed import ObservedLoop, retold
from turnwise.testing.fakes import ScriptedServer, byte_tokenizer
from turnwise.tools.tool_box import OfferedTool, ToolBox
from turnwise.types import SamplingParams, Task, Trajectory

TEMPLATE = ChatTemplate(byte_tokenizer(), TOOL_CHATML)
TASK = Task(id="train/data/0", tag="data", split="train", seed=0, payload={"prompt": "6 / 3?"}, row=0)
CALL = '<tool_call>{"name": "note", "arguments": {"text": "x"}}</tool_call>'


class Notes(SilentObserver):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def asked(self, place, messages):
        self.events.append(("asked", *place, [message["role"] for message in messages]))

    def sampled(self, place, turn, reply):
        self.events.append(("sampled", *place, turn.text))

    def called(self, name, arguments, result, seconds):
        assert seconds >= 0
        self.events.append(("called", name, dict(arguments), result))

    def reset(self, env, result):
        self.events.append(("reset", type(env), result[0]))

    def stepped(self, env, action, result):
        self.events.append(("stepped", type(env), action, result[1]))

    def rewarded(self, place, turn):
        self.events.append(("rewarded", *place, turn.reward))

    def ended(self, trajectories, fault):
        self.events.append(("ended", len(trajectories), type(fault)))


def play(loop: AgentLoop, responses: list[str]) -> list[Trajectory]:
    server = ScriptedServer(map(TEMPLATE.respond, responses))
    contexts = TokenContexts(TEMPLATE, server, 4096, "episode", find_parser("hermes", TEMPLATE))
    return asyncio.run(loop.run(TASK, 0, contexts, SamplingParams(max_new_tokens=256)))


def tool_agent() -> ToolAgent:
    tools = ToolBox([OfferedTool(Notebook())], timeout_s=60.0)
    return ToolAgent(RowAgentSettings(), tools=tools, limits=ToolAgentLimits())


CALLED = [
    ("asked", 0, 0, ["user"]),
    ("sampled", 0, 0, CALL),
    ("called", "note", {"text": "x"}, "x"),
    ("rewarded", 0, 0, 0.0),
    ("asked", 1, 0, ["tool"]),
    ("sampled", 1, 0, "2"),
    ("rewarded", 1, 0, 0.0),
    ("ended", 1, type(None)),
]


def test_every_observer_of_nested_ones_hears_the_whole_episode_and_nothing_changes() -> None:
    inner, outer = Notes(), Notes()
    foreign = OverForeignText(ObservedLoop(tool_agent(), lambda *_: inner))
    [observed] = play(ObservedLoop(foreign, lambda *_: outer), [CALL, "2"])
    assert inner.events == outer.events == CALLED
    [plain] = play(tool_agent(), [CALL, "2"])
    assert [turn.prompt_ids.tolist() for turn in observed.turns] == [
        turn.prompt_ids.tolist() for turn in plain.turns
    ]
    assert observed.metrics.keys() == plain.metrics.keys() and observed.score == plain.score


def test_a_finished_trajectory_is_told_as_it_was_played_but_for_what_tools_and_environments_said() -> None:
    notes = Notes()
    [trajectory] = play(tool_agent(), [CALL, "2"])
    retold(trajectory, notes)
    assert notes.events == [event for event in CALLED if event[0] != "called"]
    for turn in trajectory.turns:
        turn.messages = ()  # as files leave them out
    again = Notes()
    retold(trajectory, again)
    assert [event[0] for event in again.events] == [event[0] for event in notes.events]
    assert again.events[1] == ("sampled", 0, 0, trajectory.turns[0].text)


@pytest.mark.parametrize("mode", ["trajectory", "step"])
def test_steps_of_an_environment_and_rewards_come_with_their_turns(mode: str) -> None:
    settings = EnvAgentSettings("data", max_steps=2, turn_template="{observation}", mode=mode)
    notes = Notes()

    def heard_loop(observer: Notes) -> EnvAgent:
        return EnvAgent(lambda task: ObservedEnv(IdentityEnv(), observer), settings)

    unheard = EnvAgent(lambda _: IdentityEnv(), settings)
    loop = ObservedLoop(unheard, lambda *_: notes, heard_loop)
    [trajectory] = play(loop, ["<answer>a</answer>"] * 2)
    kinds = [
        "reset",
        "asked",
        "sampled",
        "stepped",
        "rewarded",
        "asked",
        "sampled",
        "stepped",
        "rewarded",
        "ended",
    ]
    assert [event[0] for event in notes.events] == kinds
    assert {event[1] for event in notes.events if event[0] in ("reset", "stepped")} == {IdentityEnv}
    assert [event[1:3] for event in notes.events if event[0] == "sampled"] == [
        (0, 0),
        (1, int(mode == "step")),
    ]
    assert [event[3] for event in notes.events if event[0] == "rewarded"] == [
        turn.reward for turn in trajectory.turns
    ]


def test_an_episode_that_raises_ends_for_its_observer_too_and_one_nobody_observes_is_left_alone() -> None:
    notes = Notes()
    loop = ObservedLoop(tool_agent(), lambda task, sibling: notes if sibling == 0 else None)
    with pytest.raises(ServerError):
        play(loop, [CALL])
    assert notes.events[-1] == ("ended", 0, ServerError)
    num_events = len(notes.events)
    contexts = TokenContexts(
        TEMPLATE, ScriptedServer([TEMPLATE.respond("2")]), 4096, "e", find_parser("hermes", TEMPLATE)
    )
    [trajectory] = asyncio.run(loop.run(TASK, 1, contexts, SamplingParams(max_new_tokens=256)))
    assert trajectory.sibling == 1 and len(notes.events) == num_events


class Resending:
    """An agent that sends its whole history with each request, and asks its second question twice."""

    async def run(self, task, sibling, open_conversation, sampling):
        tree = opens_trees(open_conversation, "resending").open_tree(sampling, match="exact", max_turns=3)
        messages = [{"role": "user", "content": task.payload["prompt"]}]
        first = await tree.answer(messages)
        again = [*messages, first.message, {"role": "user", "content": "Sure?"}]
        answers = [first, await tree.answer(again), await tree.answer([{"role": "user", "content": "New"}])]
        for answer in answers:
            tree.deliver(answer)
        return [tree.trajectory(task, sibling)]


def test_answers_of_a_tree_are_told_as_they_are_sampled_and_each_root_is_a_context() -> None:
    inner, outer = Notes(), Notes()
    foreign = OverForeignText(ObservedLoop(Resending(), lambda *_: inner))
    [trajectory] = play(ObservedLoop(foreign, lambda *_: outer), ["1", "2", "3"])
    assert (
        inner.events
        == outer.events
        == [
            ("asked", 0, 0, ["user"]),
            ("sampled", 0, 0, "1"),
            ("asked", 1, 0, ["user"]),
            ("sampled", 1, 0, "2"),
            ("asked", 2, 1, ["user"]),
            ("sampled", 2, 1, "3"),
            *(("rewarded", number, int(number == 2), 0.0) for number in range(3)),
            ("ended", 1, type(None)),
        ]
    )
    assert [turn.parent for turn in trajectory.turns] == [None, 0, None]
    assert all(turn.is_trained for turn in trajectory.turns)


def test_a_tree_needs_a_model_that_samples_tokens() -> None:
    with pytest.raises(ConfigError, match="resending"):
        asyncio.run(Resending().run(TASK, 0, lambda *_, **__: None, SamplingParams(max_new_tokens=256)))
