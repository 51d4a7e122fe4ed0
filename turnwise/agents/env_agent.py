"""The agent of an environment: reset, then observe, generate, parse and step until the episode ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from turnwise.agents.env_session import CallSettings, EnvSession
from turnwise.agents.prompts import EnvPrompt
from turnwise.envs.contract import StepResult, reduce_metric
from turnwise.envs.parsing import compile_pattern, parse_action
from turnwise.errors import ConfigError
from turnwise.protocols import Conversation, Env, HasStateKey, OpenConversation
from turnwise.spec import DEFAULT_ACTION_PATTERN, DEFAULT_TURN_TEMPLATE
from turnwise.types import Limit, Message, Observation, Reduction, SamplingParams, Task, Trajectory


@dataclass(frozen=True, slots=True)
class EnvAgentSettings:
    """How the episodes of one environment tag are played.

    Raises:
        ConfigError: a limit below 1, or a pattern that is no regular expression.
    """

    tag: str
    max_steps: int = 20
    """Actions of an episode; reaching it truncates with the limit `max_steps`."""
    max_tokens_per_step: int = 512
    system_template: str = ""
    turn_template: str = DEFAULT_TURN_TEMPLATE
    action_pattern: str | None = DEFAULT_ACTION_PATTERN
    """None takes the whole response as the action."""
    calls: CallSettings = field(default_factory=CallSettings)

    def __post_init__(self) -> None:
        for name, value in (("max_steps", self.max_steps), ("max_tokens_per_step", self.max_tokens_per_step)):
            if value < 1:
                raise ConfigError(f"custom_envs.{self.tag}.{name} is {value}; it must be at least 1")
        if self.action_pattern is not None:
            compile_pattern(self.action_pattern)


class EnvAgent:
    """Plays the tasks of one environment tag, each in an environment and a conversation of its own (mode `trajectory`).

    What an environment raises is passed on; what it returns against the contract, and a call without end, raises
    `EnvironmentFault`. The environment is closed on every path.
    """

    def __init__(self, make_env: Callable[[Task], Env], settings: EnvAgentSettings) -> None:
        self._make_env = make_env
        self._settings = settings
        self._prompt = EnvPrompt(settings.system_template, settings.turn_template)
        self._open_session = settings.calls.opener(settings.tag)

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        """One trajectory: finished by the environment, or truncated by a limit that it names.

        Raises:
            EnvironmentFault: the environment broke its contract, or didn't answer; the message names it, the turn or method,
                and what was allowed.
        """
        session = self._open_session()
        try:
            await session.make(self._make_env, task)
            try:
                return [await self._play(session, task, sibling, open_conversation(sampling))]
            finally:
                await session.close()
        finally:
            session.end()

    async def _play(self, session: EnvSession, task: Task, sibling: int, conversation: Conversation) -> Trajectory:
        settings = self._settings
        observation, info = await session.reset(task.seed)
        instruction = str(info.get("env_instruction", ""))
        steps: list[StepResult] = []
        limit: Limit | None = "max_steps"
        for turn_idx in range(1, settings.max_steps + 1):
            messages = self._prompt.messages(
                observation,
                turn_idx=turn_idx,
                actions_left=settings.max_steps - turn_idx + 1,
                max_response_length=settings.max_tokens_per_step,
                env_instruction=instruction,
                suffix=str(info.get("suffix", "")),
            )
            reply = await conversation.generate(messages, max_new_tokens=settings.max_tokens_per_step)
            if reply is None:
                limit = "sequence_length"
                break
            step = await self._take_turn(session, turn_idx, observation, reply, conversation)
            steps.append(step)
            observation, info = step.observation, step.info
            if step.is_terminated or step.is_truncated:
                limit = None if step.is_terminated else "environment"
                break
        return Trajectory(
            task=task,
            sibling=sibling,
            turns=conversation.turns,
            status="finished" if limit is None else "truncated",
            limit=limit,
            metrics=_episode_metrics(steps, session.env.metric_reductions),
        )

    async def _take_turn(
        self, session: EnvSession, turn_idx: int, observation: Observation, reply: Message, conversation: Conversation
    ) -> StepResult:
        """Hands the parsed action to the environment and writes what came of it into the conversation's last turn."""
        turn, env = conversation.turns[-1], session.env
        turn.observation, turn.media = observation.text, observation.media
        turn.state_key = env.state_key() if isinstance(env, HasStateKey) else observation.text
        turn.action = parse_action(reply["content"], self._settings.action_pattern)
        started = time.perf_counter()
        step = await session.step(turn.action or "", turn_idx)
        turn.step_s = time.perf_counter() - started
        turn.reward, turn.metrics = step.reward, step.metrics
        return step


def _episode_metrics(steps: list[StepResult], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Each declared metric over the steps that report it, and the number of actions."""
    metrics = {"num_actions": float(len(steps))}
    for name, reduction in reductions.items():
        values = [step.metrics[name] for step in steps if name in step.metrics]
        if values:
            metrics[name] = reduce_metric(values, reduction)
    return metrics
