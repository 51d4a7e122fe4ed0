"""Builds what plays episodes from a config: the policy and its servers, the agents, and the schedulers of
rollouts."""

import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from transformers import PreTrainedTokenizerBase

from turnwise.assemble.agents import build_agent, build_row_agent
from turnwise.assemble.env_workers import remote_tags, start_env_workers
from turnwise.assemble.gateway import RunGateway
from turnwise.assemble.placement import place_here
from turnwise.assemble.ray import open_hosts
from turnwise.assemble.rewards import build_reward_manager
from turnwise.assemble.servers import build_servers
from turnwise.assemble.tasks import build_tasks, say_shared_prompts
from turnwise.assemble.traces import MakeTraces, no_traces, say_untraced, traced_agents, traced_score
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.tool_calls import find_parser, parser_if_asked
from turnwise.cluster.env_pool import EnvPool, prepare_workers
from turnwise.cluster.hosts import Hosts
from turnwise.config import AgenticConfig
from turnwise.data.rewards import RewardManager
from turnwise.envs.registry import takes_split
from turnwise.errors import ConfigError
from turnwise.examine.agents import agent_settings
from turnwise.examine.envs import env_factory
from turnwise.examine.examined import Examined
from turnwise.inference.server_manager import LLMServerManager
from turnwise.pipelines.pictures import NUM_RECORDED, Pictures
from turnwise.protocols import AgentLoop, ToolCallParser
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.tasks import SeededTasks, TaskSource
from turnwise.rollout.turn_journal import TurnJournal
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.info import PolicyInfo
from turnwise.runtime.placement import Placement
from turnwise.runtime.schedule_log import ScheduleLog
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.tracking.traces import Traces
from turnwise.types import SamplingParams, Split, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RolloutContext:
    """A policy without its weights, but with its tokenizer and chat template, and the event loop that its
    rollouts run on."""

    info: PolicyInfo
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    event_loop: WatchedRunner
    schedule_log: ScheduleLog
    turn_journal: TurnJournal | None
    traces: Traces | None
    gateway: RunGateway = field(kw_only=True)
    env_pools: dict[Split, dict[str, EnvPool]] = field(default_factory=dict, kw_only=True)
    """The environment workers of each split that has agents, by tag. They end with the event loop."""

    def close(self) -> None:
        self.event_loop.close()


@dataclass(frozen=True)
class ServedPolicy(RolloutContext):
    """A policy with the servers that sample from it."""

    servers: LLMServerManager
    score: RewardManager | None
    """Scores episodes of all splits by `data.reward`; None if no reward is set."""
    hosts: Hosts
    """Who has started the processes of servers and of the reward role."""

    def run_apart(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs `main`, empties the servers' KV caches, and returns the result. No other requests may run
        meanwhile. If a later episode reused a prefix that `main` had cached, the last bits of its log-probs
        would change."""
        result = self.event_loop.run(main)
        self.event_loop.run(self.servers.sleep(["kv_cache"]))
        self.event_loop.run(self.servers.wake(["kv_cache"]))
        return result

    def close(self) -> None:
        with ExitStack() as endings:  # in reverse order
            endings.callback(self.event_loop.close)
            endings.callback(self.hosts.close)
            endings.callback(lambda: self.event_loop.run(self.servers.close()))


def open_rollout_context(
    examined: Examined,
    model_path: str | None = None,
    stopwatch: Stopwatch | None = None,
    schedule_log: ScheduleLog | None = None,
    turn_journal: TurnJournal | None = None,
    make_traces: MakeTraces = no_traces,
) -> RolloutContext:
    """The config's policy, or the one at `model_path` (a folder or hub name), without its weights.
    `make_traces` makes its traces, given its tokenizer."""
    files = examined.policy(model_path)
    if any(remote_tags(examined.config, split) for split in get_args(Split)):
        prepare_workers()
    event_loop = WatchedRunner(iteration_s=examined.config.deadlines.env_s, stopwatch=stopwatch)
    return RolloutContext(
        files.info,
        files.tokenizer,
        files.template,
        event_loop,
        schedule_log or ScheduleLog(),
        turn_journal,
        make_traces(files.tokenizer),
        gateway=RunGateway(examined.config, event_loop),
    )


def serve(
    examined: Examined,
    placement: Placement,
    policy: RolloutContext,
    hosts: Hosts,
    needs: frozenset[str] = frozenset(),
    neighbours: Mapping[str, Any] | None = None,
) -> ServedPolicy:
    """The policy with its inference servers, in this process or in those that `hosts` starts. `needs` is
    `Algorithm.needs`. `neighbours` are this process's workers by role. A server in this process reads the
    trainer's own parameters if the trainer runs here too, both have the same dtype, `model_update_frequency`
    is 1 and there is no adapter. Otherwise the server loads a copy in the dtype of actor_infer."""
    config = examined.config
    num_train_episodes = scheduler_settings(config, "train", needs).num_concurrent_episodes
    num_val_episodes = scheduler_settings(config, "val").num_concurrent_episodes
    max_concurrency = max(num_train_episodes, num_val_episodes)
    if config.plays_ahead:
        # Only training episodes that are played ahead run during a validation.
        max_concurrency = num_train_episodes + num_val_episodes
    actor_train = config.actor_train
    is_shared = actor_train.model_update_frequency == 1 and not actor_train.model_args.has_adapter
    if neighbours is None or not is_shared:
        neighbours = {}
    servers = build_servers(
        config,
        placement,
        policy.info,
        policy.event_loop,
        policy.schedule_log,
        max_concurrency=max_concurrency,
        neighbours=neighbours,
        hosts=hosts,
    )
    manager = LLMServerManager(
        servers, request_s=config.deadlines.request_s, watchdog=policy.event_loop.watchdog
    )
    score = build_reward_manager(examined, placement, policy.template, policy.event_loop, hosts)
    return ServedPolicy(**vars(policy), servers=manager, score=score, hosts=hosts)


def open_served_policy(
    examined: Examined,
    model_path: str | None = None,
    needs: frozenset[str] = frozenset(),
    make_traces: MakeTraces = no_traces,
) -> ServedPolicy:
    """The policy of the config, or the one in the folder `model_path`, with its servers but without a
    trainer."""
    if make_traces is no_traces:
        say_untraced(examined.config)
    policy = open_rollout_context(examined, model_path, make_traces=make_traces)
    with ExitStack() as on_error:
        on_error.callback(policy.close)
        # Nothing is trained, so no process is for that.
        placement = replace(place_here(examined.config), devices=(), roles={})
        event_loop = policy.event_loop
        hosts = open_hosts(examined.config, placement, event_loop.watchdog, event_loop.stopwatch)
        on_error.callback(hosts.close)
        served = serve(examined, placement, policy, hosts, needs)
        on_error.pop_all()
    return served


def build_scheduler(
    examined: Examined,
    policy: ServedPolicy,
    split: Split,
    tasks: TaskSource | None = None,
    pictures: Pictures | None = None,
    settings: SchedulerSettings | None = None,
    sampling: SamplingParams | None = None,
) -> RolloutScheduler:
    """The scheduler of a split's rollouts. Validation plays the same tasks every time. `tasks`, `settings`
    and `sampling` replace `build_tasks`, `scheduler_settings` and `sampling_params` of the split."""
    config = examined.config
    is_validation = split == "val"
    agents = agents_of(examined, split, policy, pictures)
    if policy.turn_journal:
        agents = policy.turn_journal.noted(agents)
    score = policy.score
    if policy.traces:
        agents = traced_agents(agents, policy.traces)
        score = traced_score(score, policy.traces)
    run_async: Callable[..., Any] = policy.event_loop.run
    if is_validation and not config.plays_ahead:
        run_async = policy.run_apart
    contexts = partial(
        TokenContexts,
        policy.template,
        policy.servers,
        config.sequence_length,
        parser=parser_of(config, policy.template),
    )
    return RolloutScheduler(
        run_async=run_async,
        tasks=tasks or build_tasks(examined, split, policy.template),
        agents=agents,
        contexts=contexts,
        sampling=sampling or sampling_params(config, split),
        settings=settings or scheduler_settings(config, split),
        is_fixed=is_validation,
        keep=None if is_validation else examined.group_filter,
        score=score,
        schedule_log=policy.schedule_log,
        stopwatch=policy.event_loop.stopwatch,
        watchdog=policy.event_loop.watchdog,
    )


def parser_of(config: AgenticConfig, template: ChatTemplate) -> ToolCallParser | None:
    """The parser that finds tool calls in responses; None if no agent may have tools."""
    if config.agent.has_tools:
        return find_parser(config.agent.tool_parser, template)
    if not config.may_bring_tools:
        return None
    return parser_if_asked(config.agent.tool_parser, template)


def agents_of(
    examined: Examined,
    split: Split,
    policy: RolloutContext,
    pictures: Pictures | None = None,
) -> Callable[[Task], AgentLoop]:
    """A function that returns a task's agent. Agents of rows are made when they are first asked for, the
    others at once."""
    config = examined.config
    event_loop = policy.event_loop
    of_environments: dict[tuple[str, str], AgentLoop] = {}
    if split not in policy.env_pools:
        hosts = policy.hosts if isinstance(policy, ServedPolicy) else None
        policy.env_pools[split] = start_env_workers(config, split, event_loop, hosts, policy.env_pools)
    for tag in config.env_manager(split).env_tags:
        settings = agent_settings(config, tag, split, event_loop.watchdog, event_loop.stopwatch)
        make_env = make_shown = env_factory(config, tag, split)
        pool = policy.env_pools[split].get(tag)
        if pool is not None:
            make_env = pool.make
            make_shown = partial(pool.make, renders=True)
            settings = replace(settings, calls=replace(settings.calls, are_remote=True))
        build = partial(
            build_agent,
            examined,
            tag,
            split,
            settings=settings,
            gateway=policy.gateway,
        )
        agent = build(make_env)
        if pictures is not None:
            agent = pictures.recorded(build, make_env, make_shown)
        of_environments[tag, config.custom_envs[tag].agent_name] = agent
    of_rows = cache(
        lambda name: build_row_agent(
            examined,
            split,
            name,
            event_loop,
            policy.gateway,
        )
    )

    def agent_of(task: Task) -> AgentLoop:
        key = (task.tag, task.agent)
        if task.row is None and key in of_environments:
            return of_environments[key]
        return of_rows(task.agent)

    return agent_of


def scheduler_settings(
    config: AgenticConfig, split: Split, needs: frozenset[str] = frozenset()
) -> SchedulerSettings:
    """The settings of a split's scheduler. Each group has a greedy sibling if the algorithm `needs` one."""
    manager = config.env_manager(split)
    return SchedulerSettings(
        group_size=manager.group_size,
        max_concurrent_groups=manager.num_env_groups,
        max_env_retries=manager.max_env_retries,
        max_failed_fraction=manager.max_failed_fraction,
        # An agent that ends its episodes itself makes one call before the time begins and one after it is up.
        episode_timeout_s=manager.episode_timeout_s + 2 * manager.env_step_timeout_s + _grace_s(config),
        max_refill_factor=config.max_refill_factor,
        has_greedy_sibling="greedy_sibling" in needs,
        group_size_redundancy=manager.group_size_redundancy,
    )


def _grace_s(config: AgenticConfig) -> float:
    """Seconds that an agent of the gateway may take to end once its time is up."""
    if not config.names_gateway:
        return 0.0
    of_tags = [config.gateway_play(config.custom_envs[tag].agent_args) for tag in config.gateway_tags]
    return 2 * max(play.grace_s for play in (config.agent, *of_tags))


def seeded_tasks(config: AgenticConfig, split: Split) -> SeededTasks:
    """The tasks of a split in playing order. The split must have no rows of data sets."""
    manager = config.env_manager(split)
    return SeededTasks(
        config.seed,
        split,
        tuple(manager.tags),
        tuple(manager.num_groups_partition),
    )


def build_pictures(config: AgenticConfig, run: str) -> Pictures:
    """The recorder of the first validation tasks. It records none if `render_save_dir` is unset or validation
    has rows."""
    recorded: list[str] = []
    if config.render_save_dir and not config.val_env_manager.has_rows:
        source = seeded_tasks(config, "val")
        recorded = [source.task(index).id for index in range(NUM_RECORDED)]
    return Pictures(Path(config.render_save_dir or "").absolute() / config.exp_name / run, recorded)


def say_warnings(examined: Examined) -> None:
    """Warns, at the start of a run, of what is left out of the config's tools, of prompts that training and
    validation share, and of environments that may give both the same tasks because they take no `split`."""
    config = examined.config
    for note in examined.notes:
        logger.warning("%s", note)
    say_shared_prompts(examined)
    if not config.uses_validation:
        return
    for tag in config.env_manager("val").env_tags:
        if not takes_split(config.custom_envs[tag].env_type):
            logger.warning(
                "custom_envs.%s takes no `split`: its validation tasks differ from training by seed only", tag
            )


def sampling_params(config: AgenticConfig, split: Split) -> SamplingParams:
    """How responses of a split are sampled. `max_new_tokens` is the largest limit of its tags; an agent, or
    the room left in a context, may allow fewer tokens. Raises ConfigError if the split has nothing to
    play."""
    arguments = config.sampling(split)
    tags = config.env_manager(split).tags
    if not tags:
        raise ConfigError(
            f"data.{split}_files is unset, so there are no tasks of {split} to play; name a file of rows "
            "there"
        )
    return SamplingParams(
        max_new_tokens=max(config.max_new_tokens(split, tag) for tag in tags),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        stop_strings=tuple(arguments.stop_strings),
        do_sample=arguments.do_sample,
    )
