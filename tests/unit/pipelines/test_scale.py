"""A turn's work doesn't grow with the number of episodes at once: counted in function calls, since time
depends on the machine. `benchmarks/scale.py` measures the time."""

from __future__ import annotations

import cProfile
import pstats
from functools import partial
from pathlib import Path

import pytest
from toy_envs import IdentityEnv

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.inference.server_manager import LLMServerManager
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.tasks import SeededTasks
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
from turnwise.testing.fakes import byte_tokenizer
from turnwise.types import SamplingParams

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GROUP_SIZE, NUM_TURNS = 4, 3


def calls_of_a_turn(num_episodes: int) -> float:
    from crowd_server import CrowdServer

    template, watchdog = ChatTemplate(byte_tokenizer()), Watchdog()
    answer = template.respond("a")
    server = CrowdServer(lambda _: answer)
    calls = CallSettings(timeout_s=600.0, watchdog=watchdog)
    settings = EnvAgentSettings(
        "Letters", max_tokens_per_step=4, action_pattern=None, episode_timeout_s=600.0, calls=calls
    )
    with WatchedRunner(watchdog, 600.0) as event_loop:
        agent = EnvAgent(lambda _: IdentityEnv(num_turns=NUM_TURNS), settings)
        scheduler = RolloutScheduler(
            run_async=event_loop.run,
            tasks=SeededTasks(0, "train", ("Letters",), (1,)),
            agents=lambda task: agent,
            contexts=partial(
                TokenContexts, template, LLMServerManager([server], request_s=600.0, watchdog=watchdog), 1024
            ),
            sampling=SamplingParams(max_new_tokens=4),
            settings=SchedulerSettings(GROUP_SIZE, num_episodes // GROUP_SIZE, episode_timeout_s=600.0),
            watchdog=watchdog,
        )
        # What happens once: every text of this environment is rendered.
        scheduler.get_batch(10 * GROUP_SIZE)
        profile = cProfile.Profile(builtins=True)
        profile.runcall(scheduler.get_batch, num_episodes)
    assert server.largest_crowd == num_episodes
    return pstats.Stats(profile).total_calls / (num_episodes * NUM_TURNS)


def test_the_work_of_a_turn_does_not_grow_with_the_number_of_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    few, many = calls_of_a_turn(80), calls_of_a_turn(800)
    assert many == pytest.approx(few, rel=0.1)
