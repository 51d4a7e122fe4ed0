"""Builds the pipeline of a reinforcement-learning run from its config."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from turnwise.algorithms.kl import KLController
from turnwise.assemble.cluster import begin_schedule_log, build_cluster, build_schedule_log, check_losses
from turnwise.assemble.health import build_health
from turnwise.assemble.parity import build_parity_gate
from turnwise.assemble.placement import place_here, prepare_run
from turnwise.assemble.ray import open_hosts
from turnwise.assemble.rollouts import (
    RolloutContext,
    ServedPolicy,
    build_pictures,
    build_scheduler,
    open_rollout_context,
    say_warnings,
    serve,
)
from turnwise.assemble.run import begin, build_checkpoints, build_trackers, set_profile
from turnwise.assemble.run_table import info_of, log_settings, settings_table
from turnwise.assemble.servers import require_abilities
from turnwise.assemble.shared_devices import FreeForTransfer, lend_devices, share_devices
from turnwise.assemble.source import build_source, num_planned_steps
from turnwise.assemble.strategies import batch_plan, reference_strategy, trained_strategy
from turnwise.assemble.tasks import build_tasks
from turnwise.assemble.traces import TracePlace, build_traces
from turnwise.assemble.weights import build_senders, build_transfer
from turnwise.chat.template import ChatTemplate
from turnwise.config import AgenticConfig, require, unavailable
from turnwise.examine.algorithm import make_algorithm
from turnwise.examine.examined import Examined
from turnwise.examine.models import call_models
from turnwise.lifecycle.by_validation import ByValidation
from turnwise.lifecycle.checkpoints import Contents
from turnwise.lifecycle.interrupt import Interrupts
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.episode_records import EpisodeRecords
from turnwise.pipelines.model_role import ModelRole
from turnwise.pipelines.token_values import TokenValueRecorder
from turnwise.protocols import Algorithm, Cluster, Stateful
from turnwise.rollout.journal import Journal
from turnwise.rollout.source import RolloutSource
from turnwise.rollout.tasks import TaskSource
from turnwise.rollout.turn_journal import TurnJournal
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.spec import OldLogProbs
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.timeline import Timeline
from turnwise.training.state import GlobalRandomState


def build_agentic(
    examined: Examined,
    folder: RunFolder,
    placement: Placement | None = None,
    is_quiet: bool = False,
    rollouts: Path | None = None,
    is_profiled: bool = False,
    repeated_run: Path | None = None,
) -> AgenticPipeline:
    """The pipeline of one run of `turnwise train`. `placement` is that on this machine, the default. With
    `rollouts` it trains on the episodes of that file. With `repeated_run` it repeats the schedule of the
    asynchronous run in that folder. With `is_profiled` it writes `timeline.json` at its close."""
    config = examined.config
    require(unavailable(config))
    placement = placement or place_here(config, plays=rollouts is None)
    say_warnings(examined)
    if rollouts is None or config.uses_validation:
        call_models(examined)
    set_profile(config)
    kl_ctrl = KLController(config.init_kl_coef, config.target_kl, config.kl_horizon)
    algorithm = make_algorithm(config, kl_ctrl)
    is_asynchronous = config.plays_ahead and rollouts is None
    stopwatch = Stopwatch()
    if is_profiled:
        stopwatch = Timeline(folder.timeline)
    schedule_log = build_schedule_log(config, placement, folder, is_asynchronous, repeated_run)
    prepare_run(placement)
    policy = open_rollout_context(
        examined,
        stopwatch=stopwatch,
        schedule_log=schedule_log,
        turn_journal=None if rollouts else _turn_journal(config, folder),
        make_traces=partial(build_traces, config, TracePlace.of_run(folder), folder.log),
    )
    with ExitStack() as on_error:
        on_error.callback(policy.close)
        tasks = None if rollouts else _tasks(examined, policy.template)
        hosts = open_hosts(config, placement, policy.event_loop.watchdog, stopwatch)
        on_error.callback(hosts.close)
        cluster = build_cluster(config, placement, policy.event_loop, hosts)
        on_error.callback(cluster.shutdown)
        check_losses(config, algorithm, cluster)
        roles = _roles(config, folder, policy, cluster, algorithm)
        served = serve(examined, placement, policy, hosts, algorithm.needs, cluster.neighbours)
        on_error.callback(lambda: policy.event_loop.run(served.servers.close()))
        require_abilities(config, served.servers.info())
        if schedule_log is not None:
            begin_schedule_log(schedule_log, config, placement, served.servers.info().engine)
        freeing = share_devices(config, placement, served.servers, policy.event_loop, roles)
        source, num_steps = build_source(examined, served, algorithm.needs, rollouts, tasks)
        log = _run_log(config, folder, num_steps, stopwatch, is_quiet, is_playing=rollouts is None)
        pipeline = _assemble(
            examined, folder, served, cluster, roles, algorithm, kl_ctrl, source, num_steps, log, freeing
        )
        policy.event_loop.watchdog.start()  # a checkpoint is loaded before the event loop's first iteration
        begin(config, folder, pipeline)
        on_error.pop_all()
    log_settings(settings_table(pipeline))
    return pipeline


def _run_log(
    config: AgenticConfig,
    folder: RunFolder,
    num_steps: int,
    stopwatch: Stopwatch,
    is_quiet: bool,
    is_playing: bool,
) -> RunLog:
    columns = AGENTIC_COLUMNS.with_shown(config.show_metrics)
    trackers = build_trackers(config, folder, columns, num_steps, is_quiet, stopwatch)
    health = build_health(config, is_playing=is_playing, run=str(folder.path))
    return RunLog(trackers, stopwatch, health)


def _tasks(examined: Examined, template: ChatTemplate) -> TaskSource:
    """The training tasks. If they end, `max_steps` becomes the number of steps until then."""
    tasks = build_tasks(examined, "train", template)
    num_steps = num_planned_steps(examined.config, tasks)
    if num_steps:
        examined.config.fill(max_steps=num_steps)
    return tasks


def _turn_journal(config: AgenticConfig, folder: RunFolder) -> TurnJournal | None:
    """The journal of the run's turns, which ends with its log; None if `turn_journal_mb` is 0."""
    if not config.turn_journal_mb:
        return None
    turn_journal = TurnJournal(folder.turns, config.turn_journal_mb * 1_000_000)
    folder.log.callback(turn_journal.close)
    return turn_journal


def _roles(
    config: AgenticConfig,
    folder: RunFolder,
    policy: RolloutContext,
    cluster: Cluster,
    algorithm: Algorithm,
) -> dict[str, ModelRole]:
    old_log_probs: OldLogProbs = config.old_log_probs
    if old_log_probs == "if_needed" and "old_logprobs" in algorithm.needs:
        old_log_probs = "always"
    stopwatch = policy.event_loop.stopwatch
    roles: dict[str, ModelRole] = {}
    trained_roles = ["actor_train"]
    if "values" in algorithm.needs:
        trained_roles.append("critic")
    for name in trained_roles:
        num_steps = config.num_training_steps(name) * config.optimizer_steps_per_batch(name)
        strategy = partial(
            trained_strategy,
            config,
            name,
            num_steps,
            policy.tokenizer,
            folder.path,
        )
        roles[name] = ModelRole(
            name,
            cluster.spawn(name, strategy),
            batch_plan(config, name),
            stopwatch,
            old_log_probs=old_log_probs,
            is_sharded=config.roles[name].strategy_args.is_sharded,
        )
    if config.needs_reference or "ref_logprobs" in algorithm.needs:
        name = "reference"
        plan = batch_plan(config, name)
        if config.is_reference_in_policy:
            roles[name] = roles["actor_train"].without_adapter(name, plan)
        else:
            workers = cluster.spawn(name, partial(reference_strategy, config))
            roles[name] = ModelRole(name, workers, plan, stopwatch)
    return roles


def _assemble(
    examined: Examined,
    folder: RunFolder,
    policy: ServedPolicy,
    cluster: Cluster,
    roles: Mapping[str, ModelRole],
    algorithm: Algorithm,
    kl_ctrl: KLController,
    source: RolloutSource,
    num_steps: int,
    log: RunLog,
    freeing: FreeForTransfer,
) -> AgenticPipeline:
    config = examined.config
    actor_train = roles["actor_train"]
    critic = roles.get("critic")
    senders = build_senders(cluster, actor_train, policy.servers)
    pictures = build_pictures(config, folder.path.name)
    val_scheduler = None
    if config.uses_validation:
        val_scheduler = build_scheduler(examined, policy, "val", pictures=pictures)
    by_validation = ByValidation(config, folder.best)
    contents = _contents(actor_train, critic, policy, algorithm, kl_ctrl, source, by_validation)
    transfer = build_transfer(
        config, cluster.placement, senders, policy.servers, freeing, policy.event_loop.watchdog
    )
    give_devices_back = lend_devices(
        config, cluster.placement, policy.servers, policy.event_loop, roles, transfer.bring_back
    )
    return AgenticPipeline(
        pipeline_config=config,
        actor_train=actor_train,
        actor_infer=policy.servers,
        reference=roles.get("reference"),
        critic=critic,
        train_rollout_scheduler=source,
        val_rollout_scheduler=val_scheduler,
        algorithm=algorithm,
        kl_ctrl=kl_ctrl,
        tokenizer=policy.tokenizer,
        weight_transfer=transfer,
        parity_gate=build_parity_gate(examined, policy, actor_train, senders.trained_weights),
        event_loop=policy.event_loop,
        cluster=cluster,
        log=log,
        records=EpisodeRecords(
            Journal(folder.rollouts, folder.val_rollouts if config.record_validation else None),
            policy.traces,
            pictures,
            TokenValueRecorder(config.record_token_values, actor_train),
        ),
        folder=folder,
        checkpoints=build_checkpoints(config, folder, num_steps, contents),
        interrupts=Interrupts(),
        by_validation=by_validation,
        give_devices_back=give_devices_back,
    )


def _contents(
    actor_train: ModelRole,
    critic: ModelRole | None,
    policy: ServedPolicy,
    algorithm: Algorithm,
    kl_ctrl: KLController,
    source: RolloutSource,
    by_validation: ByValidation,
) -> Contents:
    """What a checkpoint of the run contains."""
    subfolders: dict[str, ModelRole] = {}
    num_bytes = info_of(actor_train).saved_bytes
    if critic:
        subfolders["critic"] = critic
        num_bytes += info_of(critic).saved_bytes
    parts: dict[str, Stateful] = {
        "kl_ctrl": kl_ctrl,
        "rollouts": source,
        "random": GlobalRandomState(),
        "by_validation": by_validation,
    }
    if algorithm.running is not None:
        parts["running"] = algorithm.running
    return Contents(actor_train, policy.tokenizer, subfolders, parts, num_bytes)
