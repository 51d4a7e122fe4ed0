"""Builds the gateway of a run, and the agents that play through it."""

import asyncio
import os
from collections.abc import Callable
from functools import partial

from turnwise.agents.gateway_agent import GatewayAgent, GatewayAgentSettings, Host
from turnwise.agents.played_command import PlayedCommand
from turnwise.agents.played_function import PlayedFunction, StuckThreads
from turnwise.agents.seat import Player
from turnwise.config import AgenticConfig
from turnwise.config.read.agent_files import LoopEntry
from turnwise.examine.agents import agent_settings
from turnwise.examine.gateway import GatewayGame, game_of_rows, game_of_tag
from turnwise.gateway.rules import SessionRules
from turnwise.gateway.server import Gateway, GatewaySettings
from turnwise.gateway.sessions import Sessions
from turnwise.protocols import MakeEnv
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.spec import ROWS_TAG
from turnwise.types import Split

_MB = 2**20
_COMMANDS_PER_CORE = 4


class RunGateway:
    """The gateway of a run, which starts with its first episode and ends with the event loop."""

    def __init__(self, config: AgenticConfig, event_loop: WatchedRunner) -> None:
        arguments = config.gateway
        settings = GatewaySettings(
            arguments.host, arguments.port, arguments.public_url, arguments.max_body_mb * _MB
        )
        sessions = Sessions()
        gateway = Gateway(sessions, settings)
        self._config = config
        self._event_loop = event_loop
        self._host = Host(gateway, sessions)
        self._stuck = StuckThreads()
        self._places: dict[int, asyncio.Semaphore] = {}
        event_loop.before_close(gateway.close)

    def agent_of_environment(self, tag: str, split: Split, make_env: MakeEnv) -> GatewayAgent:
        """The agent that plays the environments of a tag."""
        config = self._config
        game = game_of_tag(config, tag)
        of_env = agent_settings(
            config,
            tag,
            split,
            self._event_loop.watchdog,
            self._event_loop.stopwatch,
        )
        settings = self._settings(game, split, tag)(
            calls=of_env.calls, episode_timeout_s=of_env.episode_timeout_s, max_steps=of_env.max_steps
        )
        return GatewayAgent(
            self._host,
            self._player(game),
            settings,
            make_env,
            self._places_of(game),
        )

    def agent_of_rows(self, split: Split, loop: LoopEntry | None = None) -> GatewayAgent:
        """The agent that plays rows, with the arguments of its entry in `agent.agent_config_path`."""
        config = self._config
        game = game_of_rows(config, loop)
        make = self._settings(game, split, ROWS_TAG)
        settings = make(
            episode_timeout_s=config.env_manager(split).episode_timeout_s,
            prompt_key=config.data.prompt_key,
            needs_score=not config.data.reward,
        )
        return GatewayAgent(self._host, self._player(game), settings, places=self._places_of(game))

    def _settings(self, game: GatewayGame, split: Split, tag: str) -> Callable[..., GatewayAgentSettings]:
        config = self._config
        arguments = config.gateway
        rules = SessionRules(
            game.models,
            max_requests=arguments.max_requests,
            max_choices=arguments.max_n,
            is_strict=arguments.strict,
            takes_temperature=arguments.client_temperature,
        )
        return partial(
            GatewayAgentSettings,
            tag,
            rules,
            game.model,
            max_new_tokens=config.max_new_tokens(split, tag),
            max_turns=config.agent.max_assistant_turns,
            match=arguments.match,
            mistakes=game.mistakes,
            mistake_reward=game.keys.mistake_reward,
        )

    def _player(self, game: GatewayGame) -> Player:
        keys = game.keys
        if game.function is not None:
            return PlayedFunction(
                game.function,
                game.label,
                game.offered,
                keys.grace_s,
                self._stuck,
            )
        return PlayedCommand(game.command, game.label, keys.environment, keys.grace_s)

    def _places_of(self, game: GatewayGame) -> asyncio.Semaphore | None:
        """How many commands run at once: functions have no limit."""
        if game.function is not None:
            return None
        num_at_once = game.keys.max_processes or _COMMANDS_PER_CORE * (os.cpu_count() or 1)
        return self._places.setdefault(num_at_once, asyncio.Semaphore(num_at_once))
