"""Makes environments of a config's tags, and tries each once before a run."""

from collections.abc import Mapping
from contextlib import chdir

from turnwise.config import AgenticConfig
from turnwise.envs.base import TextEnv
from turnwise.envs.contract import check_shape
from turnwise.envs.registry import env_class, make_env
from turnwise.errors import ConfigError, EnvironmentFault, nearest
from turnwise.examine.agents import agent_settings
from turnwise.protocols import MakeEnv
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Split, Task


def env_factory(config: AgenticConfig, tag: str, split: Split) -> MakeEnv:
    """A function that makes an environment of the tag for one split. The environment's `reset(seed=...)`
    decides the task."""
    env = config.custom_envs[tag]
    return lambda task: make_env(env.env_type, env.env_config, split)


def check_shown_metrics(config: AgenticConfig) -> None:
    """Raises ConfigError if no environment of the config reports a metric of `show_metrics`. Agents and
    environments that aren't ours to know, and rows, may report any."""
    reported = {"num_actions"}
    for manager in (config.train_env_manager, config.val_env_manager):
        if manager.has_rows:
            return
        for tag in manager.env_tags:
            env = config.custom_envs[tag]
            cls = env_class(env.env_type)
            if env.agent_name != "env_agent" or not issubclass(cls, TextEnv):
                return
            if not isinstance(cls.metric_reductions, Mapping):
                return
            reported |= cls.metric_reductions.keys()
    for name in config.show_metrics:
        if name not in reported:
            raise ConfigError(
                f"no environment reports {name!r}; they report {', '.join(sorted(reported))}."
                f"{nearest(name, reported)}"
            )


def try_environment(config: AgenticConfig, tag: str, split: Split) -> None:
    """Makes an environment of the tag and closes it. Raises TurnwiseError if that fails, or no model here can
    play it."""
    with (
        Watchdog() as watchdog,
        chdir("."),
        Foreign(f"custom_envs.{tag}: making and closing an environment", "at the start", are_faults=True),
    ):
        calls = agent_settings(config, tag, split, watchdog).calls
        with calls.limit(tag, "the environment's constructor"):
            make = env_factory(config, tag, split)
            env = make(Task(id="check", tag=tag, split=split, seed=0))
        check_shape(env)
        with calls.limit(tag, f"{type(env).__name__}.close"):
            env.close()
    if isinstance(env, TextEnv) and env.shows_pictures:
        raise EnvironmentFault(
            f"custom_envs.{tag}.env_config: observations are pictures, and no model of this version reads "
            "pictures; remove render_mode: rgb_array, so that they are text"
        )
