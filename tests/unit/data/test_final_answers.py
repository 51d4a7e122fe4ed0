"""What rewards read of an episode of several conversations: the final answer, and the conversation that ends
with it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from turnwise.data.reward_functions import FunctionReward
from turnwise.data.rewards import messages_of
from turnwise.examine.rewards import recorded_text
from turnwise.types import Group, Task, Trajectory, Turn

TASK = Task("t", "data", "train", 0, payload={"prompt": "go"}, row=0)


def turn(asked: str, text: str, parent: int | None) -> Turn:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
    ids = np.array([len(text)])
    return Turn(
        ids,
        ids,
        np.zeros(1, np.float32),
        text=text,
        observation=asked,
        parent=parent,
        starts_context=parent is None,
        messages=messages,
    )


def episode(answer: str | None = None) -> Trajectory:
    """A conversation of turns 0 and 2, and a sub-agent's, turns 1 and 3, which ends later."""
    turns = [turn("go", "first", None), turn("sub", "helped", None)]
    turns += [turn("again", "last", 0), turn("more", "nothing", 1)]
    return Trajectory(TASK, 0, turns, answer_turn=2, answer=answer)


def rewarded(trajectory: Trajectory, form: Any) -> dict[str, Any]:
    """What a reward function is called with."""
    seen: dict[str, Any] = {}

    def noting(completions: list[Any], completion_ids: list[Any], messages: list[Any]) -> list[float]:
        seen.update(completions=completions, completion_ids=completion_ids, messages=messages)
        return [0.0]

    reward = FunctionReward("noting", noting, recorded_text, "prompt", form=form)
    asyncio.run(reward(Group(TASK, [trajectory])))
    return seen


def test_the_answer_turn_is_the_completion() -> None:
    seen = rewarded(episode(), "text")
    assert seen["completions"] == ["last"] and seen["completion_ids"] == [[4]]
    assert [message["content"] for message in seen["messages"][0]] == ["go", "first", "again", "last"]


def test_messages_after_the_prompt_are_those_of_the_answer() -> None:
    seen = rewarded(episode(), "messages")
    assert [message["content"] for message in seen["completions"][0]] == ["first", "again", "last"]


@pytest.mark.parametrize("form", ["text", "messages"])
def test_an_answer_that_the_agent_handed_back_comes_first(form: str) -> None:
    [completion] = rewarded(episode("forty-two"), form)["completions"]
    text = completion if form == "text" else completion[-1]["content"]
    assert text == "forty-two"


def test_an_episode_of_one_conversation_is_read_as_ever() -> None:
    trajectory = Trajectory(TASK, 0, [turn("go", "a", None), turn("again", "b", 0)])
    assert [message["content"] for message in messages_of(trajectory, "prompt")] == ["go", "a", "again", "b"]
    assert trajectory.final_text == "b"
