"""The agent that plays environments: `reset`, then observe, generate, parse and `step` until the episode
ends."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from turnwise.agents.env_session import CallSettings, EnvSession
from turnwise.agents.prompts import EnvPrompt
from turnwise.envs.contract import StepResult, reduce_metric
from turnwise.envs.parsing import compile_pattern, read_action
from turnwise.errors import ConfigError, EnvironmentFault
from turnwise.protocols import Conversation, Env, OpenConversation
from turnwise.spec import DEFAULT_ACTION_PATTERN, DEFAULT_TURN_TEMPLATE, ContextMode
from turnwise.types import (
    CallOptions,
    Limit,
    Observation,
    Reduction,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    Turn,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvAgentSettings:
    """How episodes of one tag are played. Raises ConfigError for fewer than 1 step or token, or an invalid
    `action_pattern`."""

    tag: str
    max_steps: int = 20
    """Maximum actions per episode. An episode that isn't over after them is truncated (limit `max_steps`)."""
    max_tokens_per_step: int = 512
    system_template: str = ""
    turn_template: str = DEFAULT_TURN_TEMPLATE
    action_pattern: str | None = DEFAULT_ACTION_PATTERN
    """Regular expression whose last group is the action; None = the whole response outside think blocks is
    the action."""
    mode: ContextMode = "trajectory"
    """`trajectory`: one context that grows. `step`: each turn has a context and a prompt of its own."""
    history_length: int | None = None
    """Maximum number of earlier turns that a prompt shows in mode `step`; None = all."""
    episode_timeout_s: float | None = None
    """Maximum seconds of play; None = no limit. A longer episode is truncated after its last complete turn
    (limit `time`), or fails if it has none."""
    calls: CallSettings = field(default_factory=CallSettings)

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_tokens_per_step"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"custom_envs.{self.tag}.{name} is {value}; it must be at least 1")
        if self.action_pattern is not None:
            compile_pattern(self.action_pattern)


class EnvAgent:
    """Plays the tasks of one environment tag, each in its own environment, which is closed however the
    episode ends. Exceptions of an environment are passed on. A result that breaks the contract, or a call
    past its deadline, raises EnvironmentFault.
    """

    def __init__(self, make_env: Callable[[Task], Env], settings: EnvAgentSettings) -> None:
        self._make_env = make_env
        self._settings = settings
        self._prompt = EnvPrompt(
            settings.system_template,
            settings.turn_template,
            settings.mode,
            settings.history_length,
        )
        self._open_session = settings.calls.opener(settings.tag)
        self._options = CallOptions(settings.max_tokens_per_step)

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """One trajectory: finished by the environment, or truncated by the limit that `Trajectory.limit`
        names."""
        session = self._open_session()
        episode = _Episode()
        try:
            await session.make(self._make_env, task)
            try:
                await self._play_in_time(
                    session,
                    episode,
                    task,
                    lambda: open_conversation(sampling),
                )
                is_in_steps = self._settings.mode == "step"
                return [
                    episode.trajectory(
                        task,
                        sibling,
                        session.env.metric_reductions,
                        is_in_steps,
                    )
                ]
            finally:
                await session.close()
        finally:
            session.end()

    async def _play_in_time(
        self,
        session: EnvSession,
        episode: "_Episode",
        task: Task,
        open_context: Callable[[], Conversation],
    ) -> None:
        settings = self._settings
        timeout_s = settings.episode_timeout_s
        limit = settings.calls.watchdog.waiting(
            "the rollouts",
            f"an episode of {settings.tag} to end",
            timeout_s,
            "episode_timeout_s",
            _TimeIsUp,
        )
        try:
            async with limit:
                await self._play(session, episode, task, open_context)
        except _TimeIsUp:
            if not episode.turns:
                raise
            logger.warning(
                "%s was truncated after %d turns: episode_timeout_s %g s",
                task.id,
                len(episode.turns),
                timeout_s,
            )

    async def _play(
        self,
        session: EnvSession,
        episode: "_Episode",
        task: Task,
        open_context: Callable[[], Conversation],
    ) -> None:
        settings = self._settings
        observation, info = await session.reset(task.seed)
        instruction = str(info.get("env_instruction", ""))
        conversation = open_context()
        for turn_idx in range(1, settings.max_steps + 1):
            messages = self._prompt.messages(
                observation,
                turn_idx=turn_idx,
                actions_left=settings.max_steps - turn_idx + 1,
                max_response_length=settings.max_tokens_per_step,
                env_instruction=instruction,
                suffix=str(info.get("suffix", "")),
                earlier=episode.turns,
            )
            if settings.mode == "step" and turn_idx > 1:
                conversation = open_context()
            reply = await conversation.generate(messages, self._options)
            if settings.mode == "step":
                await conversation.close()
            if reply is None:
                episode.limit = "sequence_length"
                return
            step = await self._take_turn(
                session,
                turn_idx,
                observation,
                conversation.turns[-1],
                conversation.turns[-1].text,
            )
            episode.turns.append(conversation.turns[-1])
            observation = step.observation
            info = step.info
            if step.is_terminated or step.is_truncated:
                episode.limit = None if step.is_terminated else "environment"
                return
        episode.limit = "max_steps"

    async def _take_turn(
        self,
        session: EnvSession,
        turn_idx: int,
        observation: Observation,
        turn: Turn,
        text: str,
    ) -> StepResult:
        turn.observation = observation.text
        turn.media = observation.media
        turn.action = await read_action(text, self._settings.action_pattern)
        started = time.perf_counter()
        step = await session.step(turn.action or "", turn_idx)
        turn.step_s = time.perf_counter() - started
        turn.state_key = session.state_key if session.has_state_key else observation.text
        turn.reward = step.reward
        turn.metrics = step.metrics
        return step


class _TimeIsUp(EnvironmentFault):
    """The episode took longer than `episode_timeout_s`."""


@dataclass(slots=True)
class _Episode:
    """The turns that the environment has answered, and the limit that cut the episode: `time` until `_play`
    sets it."""

    turns: list[Turn] = field(default_factory=list)
    limit: Limit | None = "time"

    def trajectory(
        self,
        task: Task,
        sibling: int,
        reductions: Mapping[str, Reduction],
        is_in_steps: bool,
    ) -> Trajectory:
        """The episode's trajectory; `is_in_steps`: each turn has a context of its own. Its metrics are
        `num_actions` and each metric that turns report, reduced over them."""
        metrics = {"num_actions": float(len(self.turns))}
        for name, reduction in reductions.items():
            values = [turn.metrics[name] for turn in self.turns if name in turn.metrics]
            if values:
                metrics[name] = reduce_metric(values, reduction)
        status: Status = "finished" if self.limit is None else "truncated"
        return Trajectory(
            task,
            sibling,
            self.turns,
            status=status,
            limit=self.limit,
            metrics=metrics,
            contexts_are="steps" if is_in_steps else "parts",
        )
