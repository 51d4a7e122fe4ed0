"""From a config to rollouts: the policy with its servers, the environments with their agents, the schedulers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.chat.episode import EpisodeContexts
from turnwise.chat.template import ChatTemplate
from turnwise.config import AgenticConfig
from turnwise.envs.registry import make_env, takes_split
from turnwise.errors import NotAvailableError
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.inference.hf_server import HFServer
from turnwise.inference.server_manager import LLMServerManager
from turnwise.models.fused import fuse_projections, supports_fast_path
from turnwise.models.load import load_model, load_tokenizer, parse_dtype
from turnwise.protocols import Env, InferenceServer
from turnwise.rollout.scheduler import RolloutScheduler, SchedulerSettings
from turnwise.rollout.seeds import TaskSource
from turnwise.spec import STRATEGIES
from turnwise.types import SamplingParams, Split, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Player:
    """A policy ready to play: its server, how it writes, and the event loop that it plays on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    servers: LLMServerManager
    event_loop: asyncio.Runner

    def close(self) -> None:
        self.event_loop.run(self.servers.close())
        self.event_loop.close()


def choose_device(config: AgenticConfig) -> torch.device:
    """The device of the one process that this version runs in: the first of `device_mapping`, else CUDA if there is one."""
    mapping = config.actor_train.device_mapping
    if mapping:
        if not torch.cuda.is_available() or mapping[0] >= torch.cuda.device_count():
            raise NotAvailableError(
                f"actor_train.device_mapping names device {mapping[0]}, and this machine has {torch.cuda.device_count()} CUDA "
                "devices; remove device_mapping to run in this process on the CPU"
            )
        return torch.device("cuda", mapping[0])
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_player(config: AgenticConfig, device: torch.device, is_trained: bool, model_path: str | None = None) -> Player:
    """The policy of the config (or the model of `model_path`) with its inference servers.

    Where sampling and training share a dtype the server reads the trainer's own parameters.
    """
    arguments = config.actor_train.model_args
    path = model_path or arguments.model_name_or_path
    tokenizer = load_tokenizer(path)
    dtype = torch.float32 if is_trained else parse_dtype(config.actor_infer.model_args.dtype)
    model = load_model(path, dtype=dtype, device=device, attn_implementation=arguments.attn_implementation)
    if supports_fast_path(model):
        fuse_projections(model)
    template = ChatTemplate(tokenizer)
    return Player(
        model=model,
        tokenizer=tokenizer,
        template=template,
        servers=LLMServerManager([_build_server(config, model, template)], request_s=config.deadlines.request_s),
        event_loop=asyncio.Runner(),
    )


def _build_server(config: AgenticConfig, model: PreTrainedModel, template: ChatTemplate) -> InferenceServer:
    strategy = config.actor_infer.strategy_args
    managers = (config.train_env_manager, config.val_env_manager)
    options: dict[str, Any] = {"max_length": config.sequence_length, "decode": template.decode}
    if not STRATEGIES[strategy.strategy_name].is_available:
        raise NotAvailableError(f"actor_infer: strategy {strategy.strategy_name!r} isn't in this version; use embedded or hf")
    if strategy.strategy_name == "hf":
        return HFServer(model, **options | strategy.strategy_config)
    options["max_concurrency"] = max(m.num_env_groups * m.group_size for m in managers)
    return EmbeddedServer(model, **options | strategy.strategy_config)


def build_scheduler(config: AgenticConfig, player: Player, split: Split, tasks: TaskSource | None = None) -> RolloutScheduler:
    """The rollouts of one split. Validation plays the same tasks every time."""
    manager = config.env_manager(split)
    return RolloutScheduler(
        run_async=player.event_loop.run,
        tasks=tasks or TaskSource(config.seed, split, tuple(manager.tags), tuple(manager.num_groups_partition)),
        agents={tag: build_agent(config, tag, split) for tag in manager.tags},
        contexts=partial(EpisodeContexts, player.template, player.servers, config.sequence_length),
        sampling=sampling_params(config, split),
        settings=SchedulerSettings(
            group_size=manager.group_size,
            max_concurrent_groups=manager.num_env_groups,
            max_env_retries=manager.max_env_retries,
            max_failed_fraction=manager.max_failed_fraction,
            episode_timeout_s=manager.episode_timeout_s,
        ),
        is_fixed=split == "val",
    )


def check_environments(config: AgenticConfig) -> None:
    """Makes one environment of each tag in use, so that a wrong name or argument is said before a model is loaded."""
    for split in get_args(Split):
        for tag in config.env_manager(split).tags:
            agent_settings(config, tag, split)
            make_env(config.custom_envs[tag].env_type, config.custom_envs[tag].env_config, split).close()


def build_agent(config: AgenticConfig, tag: str, split: Split) -> EnvAgent:
    """The agent that plays the environment of a tag."""
    return EnvAgent(env_factory(config, tag, split), agent_settings(config, tag, split))


def env_factory(config: AgenticConfig, tag: str, split: Split) -> Callable[[Task], Env]:
    """Makes an environment of the tag; warns where it can't keep training and validation tasks apart by content."""
    env = config.custom_envs[tag]
    if not takes_split(env.env_type):
        logger.warning(
            "environment %s takes no `split`: training and validation differ by seed only, and may share contents", env.env_type
        )

    def make(task: Task) -> Env:
        return make_env(env.env_type, env.env_config, split)

    return make


def agent_settings(config: AgenticConfig, tag: str, split: Split) -> EnvAgentSettings:
    """The limits and texts of a tag's episodes."""
    env = config.custom_envs[tag]
    return EnvAgentSettings(
        tag=tag,
        max_steps=env.max_steps,
        max_tokens_per_step=config.max_new_tokens(split, tag),
        system_template=env.agent_system_template,
        turn_template=env.agent_template,
        action_pattern=env.action_pattern,
        use_thread_lock=env.use_thread_lock,
    )


def sampling_params(config: AgenticConfig, split: Split) -> SamplingParams:
    """How a split samples; the agent and the room left in the context may ask for fewer tokens."""
    arguments = config.sampling(split)
    return SamplingParams(
        max_new_tokens=max(config.max_new_tokens(split, tag) for tag in config.env_manager(split).tags),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        repetition_penalty=arguments.repetition_penalty,
        stop_strings=tuple(arguments.stop_strings),
        do_sample=arguments.do_sample,
    )
