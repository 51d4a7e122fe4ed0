"""An agent of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnwise.envs.contract import read_reset, read_step
from turnwise.protocols import Env, OpenConversation
from turnwise.types import SamplingParams, Task, Trajectory


class OneTurnAgent:
    """Shows the first observation, takes the whole answer as the action, and stops: an `AgentLoop`."""

    def __init__(self, make_env: Callable[[Task], Env], settings: Any) -> None:
        self._make_env = make_env

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        env, conversation = self._make_env(task), open_conversation(sampling)
        observation, _ = read_reset(env.reset(seed=task.seed), task.tag)
        reply = await conversation.generate([{"role": "user", "content": observation.text}])
        if reply is not None:
            step = read_step(env.step(str(reply["content"])), task.tag, 1, env.metric_reductions)
            turn = conversation.turns[-1]
            turn.observation, turn.action, turn.reward = observation.text, str(reply["content"]), step.reward
        return [Trajectory(task=task, sibling=sibling, turns=conversation.turns, status="finished")]
