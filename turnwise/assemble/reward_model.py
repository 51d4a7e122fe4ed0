"""Builds the model of the `reward` role: a classifier that scores conversations, or a language model that
judges them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from turnwise.assemble.placement import cpu_threads, set_torch_threads
from turnwise.assemble.ray import make_ray_cluster
from turnwise.assemble.run import seed_process
from turnwise.assemble.servers import start_servers
from turnwise.assemble.strategies import batch_plan, model_source
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.cluster.hosts import Hosts
from turnwise.cluster.local import LocalCluster
from turnwise.config import AgenticConfig
from turnwise.config.schema.model_args import ModelArgs
from turnwise.data.reward_scores import RewardFault
from turnwise.data.rewards import messages_of, runs_of
from turnwise.errors import ConfigError, ModelError
from turnwise.examine.reward_role import NO_HEAD
from turnwise.inference.served_chat import ServedChat
from turnwise.inference.server_manager import LLMServerManager
from turnwise.model_files.folder import Trust
from turnwise.models.load import load_model_config, load_tokenizer, parse_dtype, policy_info
from turnwise.models.value_head import value_head
from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Cluster, InferenceServer, RewardResult
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement, RolePlacement
from turnwise.runtime.rank import RankContext
from turnwise.runtime.watchdog import Watchdog
from turnwise.spec import STRATEGIES
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Group, Message, Sample


@dataclass(frozen=True, slots=True)
class ModelReward:
    """Renders each rollout with the reward model's chat template. The score head's output at the last token
    is the reward."""

    role: ModelRole
    tokenizer: PreTrainedTokenizerBase
    prompt_key: str
    watchdog: Watchdog
    timeout_s: float

    async def __call__(self, group: Group) -> RewardResult:
        samples = [self._sample(messages_of(run[-1], self.prompt_key)) for run in runs_of(group)]
        waiting = self.watchdog.waiting(
            "an episode",
            "the reward model",
            self.timeout_s,
            "deadlines.train_s",
        )
        async with waiting:
            values = await self.role.forward_async(samples, output="next_values")
        return RewardResult([float(of_sample[-1]) for of_sample in values])

    def _sample(self, messages: list[Message]) -> Sample:
        try:
            # A message's content holds the tool calls as the policy wrote them, so a template must not add
            # them again.
            texts = [_without_calls(message) for message in messages]
            ids = self.tokenizer.apply_chat_template(texts, tokenize=True, return_dict=False)
        except (TemplateError, ValueError) as fault:
            raise RewardFault(
                f"data.reward reward_model: its chat template refuses a conversation: {fault}"
            ) from fault
        if len(ids) > self.role.plan.max_length:
            raise RewardFault(
                f"data.reward reward_model: a conversation has {len(ids)} tokens, and it takes "
                f"{self.role.plan.max_length}; "
                "lower sequence_length, or name a model with a longer context as reward_pretrain"
            )
        mask = np.zeros(len(ids), bool)
        mask[-1] = True
        return Sample(np.array(ids, np.int64), mask, np.zeros(len(ids), np.float32), ())


def _without_calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in ("tool_calls", "call_errors")}


def build_reward_model(
    config: AgenticConfig,
    placement: Placement,
    event_loop: WatchedRunner,
    hosts: Hosts | None = None,
) -> ModelReward:
    """The reward role's model, a classifier with one label. It is in an actor where the placement is on nodes
    of Ray, and `hosts` starts that. Raises ModelError if its score head is missing or all zeros."""
    arguments = config.reward.model_args
    path = arguments.model_name_or_path
    cluster = _reward_cluster(config, placement, event_loop, hosts)
    plan = replace(batch_plan(config, "reward"), max_length=_context_length(path, arguments.trust))
    workers = cluster.spawn("reward", partial(_score_head, arguments))
    role = ModelRole("reward", workers, plan, event_loop.stopwatch)
    tokenizer = load_tokenizer(path, arguments.trust)
    return ModelReward(
        role,
        tokenizer,
        config.data.prompt_key,
        event_loop.watchdog,
        config.deadlines.train_s,
    )


def _reward_cluster(
    config: AgenticConfig,
    placement: Placement,
    event_loop: WatchedRunner,
    hosts: Hosts | None,
) -> Cluster:
    deadline_s = config.deadlines.train_s
    watchdog = event_loop.watchdog
    stopwatch = event_loop.stopwatch
    if hosts is None or placement.cluster != "ray":
        return LocalCluster(stopwatch, watchdog, deadline_s, placement)
    [device] = placement.of("reward").devices
    apart = replace(
        placement, devices=(device,), roles={"reward": RolePlacement(((device,),), (0,))}, served={}
    )
    return make_ray_cluster(
        event_loop.run,
        watchdog,
        stopwatch,
        cpu_threads(config, torch.get_num_threads()),
        set_torch_threads,
        partial(seed_process, config),
        deadline_s,
        apart,
        hosts=hosts,
        process_name="the reward model's process",
    )


def _score_head(arguments: ModelArgs, rank: RankContext) -> TorchStrategy:
    model = replace(model_source(arguments), has_value_head=True).load(rank)
    head = value_head(model)
    if head is None or not head.weight.any():
        raise ModelError(f"reward_pretrain {arguments.model_name_or_path}: {NO_HEAD}")
    settings = StrategySettings(dtype=parse_dtype(arguments.dtype))
    return TorchStrategy(model, settings, rank=rank)


def build_judge(
    config: AgenticConfig,
    placement: Placement,
    event_loop: WatchedRunner,
    hosts: Hosts | None = None,
) -> ServedChat:
    """Starts a server for the reward role's language model: in an actor where the placement is on nodes of
    Ray, and `hosts` starts that, else in this process."""
    arguments = config.reward.model_args
    strategy = config.reward.strategy_args
    path = arguments.model_name_or_path
    trust = arguments.trust
    max_length = _context_length(path, trust)
    info = policy_info(path, arguments.dtype, max_length, arguments.attn_implementation, trust)
    template = tried(ChatTemplate(load_tokenizer(path, trust), eos_token_ids=info.stop_token_ids))
    entry = STRATEGIES[strategy.strategy_name].entry
    server_class: Any = load_class(entry, "reward.strategy_args.strategy_name", ConfigError)
    factory = partial(server_class.for_policy, policy=info, **strategy.strategy_config)
    servers: list[InferenceServer] = []
    if hosts is not None and placement.cluster == "ray":
        servers += start_servers(
            config,
            placement,
            "reward",
            ["the judge"],
            factory,
            event_loop,
            hosts,
        )
    else:
        rank = RankContext("reward", device=placement.device_of("reward"), stopwatch=event_loop.stopwatch)
        servers.append(factory(rank))
    manager = LLMServerManager(servers, request_s=config.deadlines.request_s, watchdog=event_loop.watchdog)
    return ServedChat(template, manager, f"the reward role's {path}", max_length)


def _context_length(path: str, trust: Trust) -> int:
    """The longest context of a model, in tokens."""
    length: int = load_model_config(path, trust).get_text_config().max_position_embeddings
    return length
