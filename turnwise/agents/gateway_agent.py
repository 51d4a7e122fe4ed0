"""The agent whose episodes are played over HTTP, by a function of the user's or a command, against the
gateway."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.agents.env_session import CallSettings
from turnwise.agents.played_env import PlayedEnv
from turnwise.agents.seat import Outcome, Player, Seat
from turnwise.chat.contexts import opens_trees
from turnwise.chat.tree import ConversationTree
from turnwise.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    EnvWorkersDeadError,
    ReplicasDeadError,
    RolloutError,
    counted,
)
from turnwise.gateway.server import Gateway
from turnwise.gateway.sessions import EpisodeSession, SessionRules, Sessions
from turnwise.protocols import MakeEnv, OpenConversation
from turnwise.spec import MatchRule
from turnwise.types import Limit, SamplingParams, Task, Trajectory

logger = logging.getLogger(__name__)


class Host(NamedTuple):
    """The gateway of a run, and its sessions."""

    gateway: Gateway
    sessions: Sessions


@dataclass(frozen=True, slots=True)
class GatewayAgentSettings:
    """How episodes of one kind of task are played."""

    tag: str
    rules: SessionRules
    model: str
    """The name of the model that players are told."""
    max_new_tokens: int = 512
    """Maximum tokens per response."""
    max_turns: int | None = None
    """Maximum responses per episode; None = no limit."""
    match: MatchRule = "omitted"
    episode_timeout_s: float | None = None
    prompt_key: str = "prompt"
    max_steps: int = 1
    """Maximum actions of an environment."""
    mistakes: tuple[type[BaseException], ...] = ()
    """Exceptions of a player that are the model's doing."""
    mistake_reward: float = 0.0
    needs_score: bool = False
    """Whether nothing but the player scores an episode."""
    calls: CallSettings = field(default_factory=CallSettings)


class GatewayAgent:
    """Plays each task as a session of the gateway. The player is told its base URL and key, and its requests
    become the turns of one trajectory. With `make_env` it also gets the task's environment; `places` limits
    the episodes that are played at once."""

    def __init__(
        self,
        host: Host,
        player: Player,
        settings: GatewayAgentSettings,
        make_env: MakeEnv | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> None:
        self.places = places
        self._host = host
        self._player = player
        self._settings = settings
        self._make_env = make_env
        self._open_env = settings.calls.opener(settings.tag)

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """One trajectory: finished when the player ends, or truncated by a limit. Raises what the player
        raised, unless a limit or a mistake of the model led to it."""
        settings = self._settings
        await self._host.gateway.start()
        trees = opens_trees(open_conversation, self._player.label)
        budget = min(settings.max_new_tokens, sampling.max_new_tokens)
        tree = trees.open_tree(
            replace(sampling, max_new_tokens=budget), match=settings.match, max_turns=settings.max_turns
        )
        session = self._host.sessions.open(tree, settings.rules, f"{task.id}/{sibling}")
        episode = _Episode(task, tree, session)
        try:
            async with self._environment(episode), _workdir() as workdir:
                await self._play(episode, workdir)
        finally:
            await self._host.sessions.end(session)
        return [episode.trajectory(sibling)]

    async def _play(self, episode: "_Episode", workdir: Path) -> None:
        """Lets the player play, until it ends or its time is up, and notes the outcome."""
        settings = self._settings
        limit = settings.calls.watchdog.waiting(
            "the rollouts",
            f"an episode of {settings.tag} to end",
            settings.episode_timeout_s,
            "episode_timeout_s",
            _TimeIsUp,
        )
        try:
            async with limit:
                episode.outcome = await self._outcome(episode, workdir)
        except _TimeIsUp:
            if not episode.session.counts["delivered"]:
                raise
            episode.limit = "time"
            logger.warning(
                "%s was truncated: episode_timeout_s %g s", episode.name, settings.episode_timeout_s
            )
        except settings.mistakes as mistake:
            if episode.limit_reached is not None:  # the client raises what a refused request raises
                logger.info(
                    "%s ended by its limit %s: %r",
                    episode.name,
                    episode.limit_reached,
                    mistake,
                )
            else:
                logger.info("%s ended by a mistake of the model: %r", episode.name, mistake)
                episode.outcome = Outcome(metrics={"mistakes": 1.0})
                episode.mistake_reward = settings.mistake_reward
        except (ConfigError, DeadlineError, EnvWorkersDeadError, ReplicasDeadError, RolloutError):
            raise
        except Exception as fault:  # boundary: the player is foreign code
            if episode.limit_reached is None:
                raise
            logger.info("%s ended by its limit %s: %r", episode.name, episode.limit_reached, fault)
        episode.require_turns(self._player.label)
        if settings.needs_score and episode.lacks_score:
            raise EnvironmentFault(
                f"{self._player.label} handed back no score, and data.reward is unset: hand back a "
                "number, or a mapping with `score`, or set data.reward"
            )

    async def _outcome(self, episode: "_Episode", workdir: Path) -> Outcome:
        """What the player hands back. If the episode ends before, the session ends first, so that a client
        fails fast, and the player has a moment to end."""
        session = episode.session
        playing = asyncio.ensure_future(self._player.play(self._seat(episode), workdir))
        try:
            awaited: list[asyncio.Future[Any]] = [playing, session.fault]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if session.fault.done():
                await session.fault
            return await playing
        finally:
            if not playing.done():
                await session.end()
                playing.cancel()
                await asyncio.wait([playing])

    def _seat(self, episode: "_Episode") -> Seat:
        task = episode.task
        env = episode.env
        prompt: Any = env.observation if env else task.payload.get(self._settings.prompt_key)
        about = {"id": task.id, "split": task.split, "seed": task.seed, "prompt": prompt}
        return Seat(
            episode=episode.name,
            url=self._host.gateway.base_url(episode.session.key),
            key=episode.session.key,
            model=self._settings.model,
            task={**task.payload, **about},
            env=env,
        )

    @asynccontextmanager
    async def _environment(self, episode: "_Episode") -> AsyncIterator[None]:
        """Makes and resets the task's environment, if there is one, and closes it."""
        if self._make_env is None:
            yield
            return
        session = self._open_env()
        try:
            await session.make(self._make_env, episode.task)
            try:
                observation, info = await session.reset(episode.task.seed)
                steps = self._settings.max_steps
                episode.env = PlayedEnv(session, observation, info, steps, episode.note_action)
                yield
            finally:
                if episode.env is not None:
                    episode.env.is_over = True  # for a thread that was left behind
                await session.close()
        finally:
            session.end()


class _TimeIsUp(EnvironmentFault):
    """The episode took longer than `episode_timeout_s`."""


@dataclass(slots=True)
class _Episode:
    """One episode: its session, and how it ended."""

    task: Task
    tree: ConversationTree
    session: EpisodeSession
    env: PlayedEnv | None = None
    outcome: Outcome = field(default_factory=Outcome)
    limit: Limit | None = None
    mistake_reward: float | None = None
    early_reward: float = 0.0
    """Rewards of the environment before the first response was delivered."""

    @property
    def name(self) -> str:
        return self.session.label

    @property
    def limit_reached(self) -> Limit | None:
        """The limit that refused the newest request, or that ended the environment."""
        return self.tree.limit or (self.env.limit if self.env else None)

    @property
    def lacks_score(self) -> bool:
        """Whether the player ended by itself, without a score."""
        is_cut = self.limit is not None or self.limit_reached is not None
        return not is_cut and self.mistake_reward is None and self.outcome.score is None

    def note_action(self, action: str, reward: float) -> None:
        """Gives the reward of an action to the response that was delivered last."""
        if self.session.last_delivered is None:
            self.early_reward += reward
            return
        turn = self.tree.turns[self.session.last_delivered]
        turn.action = action
        turn.reward += reward

    def require_turns(self, label: str) -> None:
        """Raises an error if there is nothing that could be trained on or scored."""
        if self.tree.turns:
            return
        num_requests = self.session.counts["refused"] + self.tree.counts["requests"]
        if self.session.limit_error is not None:
            raise RolloutError(f"{self.task.place}: {self.session.limit_error}")
        if not num_requests:
            raise EnvironmentFault(
                f"{label} ended without a request to its base URL: its client must use the URL and key that "
                "it is given, and no other"
            )
        raise EnvironmentFault(f"{label} got no answer to its {counted(num_requests, 'request')}")

    def trajectory(self, sibling: int) -> Trajectory:
        trajectory = self.tree.trajectory(self.task, sibling)
        limit = self.limit or trajectory.limit or (self.env.limit if self.env else None)
        trajectory.limit = limit
        trajectory.status = "truncated" if limit else "finished"
        trajectory.answer = self.outcome.answer
        if self.outcome.score is not None:
            trajectory.outcome_rewards["score"] = self.outcome.score
        if self.mistake_reward is not None:
            trajectory.outcome_rewards["mistake"] = self.mistake_reward
        if self.early_reward:
            trajectory.outcome_rewards["environment"] = self.early_reward
        trajectory.metrics = {**self.session.metrics(), **self.outcome.metrics}
        if self.env is not None:
            trajectory.metrics |= self.env.metrics()
        return trajectory


@asynccontextmanager
async def _workdir() -> AsyncIterator[Path]:
    """A new empty folder, which is removed with all that it holds."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-"))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
