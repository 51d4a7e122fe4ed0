"""Episodes of a GatewayAgent over a scripted model, without a run around them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scripted_gateway import CHAT, RULES, HeldReplies, tool_template

from turnwise.agents.env_session import CallSettings
from turnwise.agents.gateway_agent import GatewayAgent, GatewayAgentSettings, Host
from turnwise.agents.played_command import PlayedCommand
from turnwise.agents.played_function import PlayedFunction, StuckThreads
from turnwise.agents.seat import Player
from turnwise.batching.samples import build_samples
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.tool_calls import find_parser
from turnwise.gateway.server import Gateway, GatewaySettings
from turnwise.gateway.sessions import Sessions
from turnwise.protocols import MakeEnv
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.types import SamplingParams, Task, Trajectory

TASK = Task("train/data/0", "data", "train", 7, payload={"prompt": "go", "answer": "left"}, row=0)
SAMPLING = SamplingParams(max_new_tokens=256, seed=3)
GRACE_S = 0.3


def function_player(function: Callable[..., Any], *offered: str, stuck: StuckThreads | None = None) -> Player:
    return PlayedFunction(
        function, f"agent.play {function.__name__}", offered, GRACE_S, stuck or StuckThreads()
    )


def command_player(code: str, *arguments: str, **environment: str) -> Player:
    """A player that runs a program of Python."""
    command = [sys.executable, "-c", code, *arguments]
    return PlayedCommand(command, "agent.command python", environment, GRACE_S)


def play_episodes(
    player: Player,
    replies: Sequence[str] | Callable[[int], str],
    num_episodes: int = 1,
    make_env: MakeEnv | None = None,
    task: Task = TASK,
    sequence_length: int = 8192,
    fault: Exception | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """The trajectories of episodes at once, on a loop as a run has it; each model has the replies, or raises
    the fault."""
    template = tool_template()

    async def episode(runner: WatchedRunner, host: Host, number: int) -> Trajectory:
        calls = CallSettings(watchdog=runner.watchdog)
        values: dict[str, Any] = {
            "tag": task.tag,
            "rules": RULES,
            "model": "policy",
            "calls": calls,
            **settings,
        }
        agent = GatewayAgent(host, player, GatewayAgentSettings(**values), make_env)
        server = HeldReplies(replies, fault)
        parser = find_parser(None, template)
        contexts = TokenContexts(template, server, sequence_length, f"e{number}", parser)
        try:
            [trajectory] = await agent.run(task, number, contexts, replace(SAMPLING, seed=number))
        finally:
            contexts.verify()
            await contexts.close()
        trajectory.samples = build_samples(trajectory)
        return trajectory

    async def episodes(runner: WatchedRunner) -> list[Trajectory]:
        sessions = Sessions()
        host = Host(Gateway(sessions, GatewaySettings()), sessions)
        try:
            return await asyncio.gather(*(episode(runner, host, number) for number in range(num_episodes)))
        finally:
            assert len(sessions) == 0
            await host.gateway.close()

    with WatchedRunner() as runner:
        return runner.run(episodes(runner))


__all__ = ["CHAT", "TASK", "command_player", "function_player", "play_episodes"]
