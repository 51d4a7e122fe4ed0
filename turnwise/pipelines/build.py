"""From a config to objects: the one place that knows every concrete class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from turnwise.algorithms.controllers import KLController, make_kl_controller
from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.cluster.local import LocalCluster
from turnwise.config import AgenticConfig, Applied, SFTConfig, dump_yaml, require, unavailable, unavailable_for_evaluation
from turnwise.data.demonstrations import read_demonstrations
from turnwise.entry_points import load_class
from turnwise.errors import ConfigError, DataError, NotAvailableError
from turnwise.inference.weight_transfer import InProcessTransfer
from turnwise.models.load import load_model, load_tokenizer, parse_dtype
from turnwise.models.value_head import load_value_model
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.applied import applied_evaluation, log_applied, logged
from turnwise.pipelines.build_rollouts import (
    ServedPolicy,
    build_pictures,
    build_policy,
    build_scheduler,
    check_rollouts,
    choose_device,
)
from turnwise.pipelines.checkpoints import Checkpoints, Contents, Fingerprint, GlobalRandomState
from turnwise.pipelines.evaluate import Evaluation, evaluate
from turnwise.pipelines.interrupt import Interrupts
from turnwise.pipelines.parity import build_parity_gate
from turnwise.pipelines.resume import checkpoints_folder, open_run
from turnwise.pipelines.roles import BatchPlan, ModelRole
from turnwise.pipelines.run_folder import RunFolder
from turnwise.pipelines.sft import SFTPipeline
from turnwise.protocols import Algorithm, PreparesStep, Stateful, Tracker
from turnwise.rollout.journal import Journal
from turnwise.spec import ESTIMATORS
from turnwise.tracking.columns import AGENTIC_COLUMNS, SFT_COLUMNS, Columns
from turnwise.tracking.jsonl import JsonlTracker
from turnwise.tracking.live import stdout_tracker
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.tensorboard import TensorBoardTracker
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Message, Sample, derive_seed
from turnwise.watchdog import Watchdog

logger = logging.getLogger(__name__)


def build_agentic(config: AgenticConfig, folder: RunFolder, is_quiet: bool = False) -> AgenticPipeline:
    """The pipeline of one run of `turnwise train`.

    Raises:
        NotAvailableError: the config uses what this version or this machine doesn't have.
    """
    require(unavailable(config))
    check_rollouts(config)
    set_profile(config)
    kl_ctrl = make_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
    algorithm = build_algorithm(config, kl_ctrl)
    device = choose_device(config)
    policy = build_policy(config, device, is_trained=True)
    with ExitStack() as on_error:
        on_error.callback(policy.close)
        pipeline = _assemble(config, folder, policy, device, algorithm, kl_ctrl, is_quiet)
        _begin(config, folder, pipeline)
        on_error.pop_all()
    return logged(pipeline)


def _assemble(
    config: AgenticConfig,
    folder: RunFolder,
    policy: ServedPolicy,
    device: torch.device,
    algorithm: Algorithm,
    kl_ctrl: KLController,
    is_quiet: bool,
) -> AgenticPipeline:
    """The pipeline around a policy that is served."""
    cluster = LocalCluster()
    strategy = _train_strategy(config, "actor_train", policy.model, device)
    actor_train = ModelRole(
        "actor_train",
        cluster.spawn("actor_train", lambda: strategy),
        batch_plan(config, "actor_train"),
        policy.watchdog,
        prepare=algorithm.prepare if isinstance(algorithm, PreparesStep) else None,
    )
    reference = None
    if "ref_logprobs" in algorithm.needs:
        frozen = partial(_frozen_strategy, config, device)
        reference = ModelRole("reference", cluster.spawn("reference", frozen), batch_plan(config, "reference"), policy.watchdog)
    critic = None
    if "values" in algorithm.needs:
        valued = partial(_critic_strategy, config, device)
        critic = ModelRole("critic", cluster.spawn("critic", valued), batch_plan(config, "critic"), policy.watchdog)
    train_scheduler = build_scheduler(config, policy, "train")
    pictures = build_pictures(config, folder.path.name)
    parts: dict[str, Stateful] = {"kl_ctrl": kl_ctrl, "rollouts": train_scheduler, "random": GlobalRandomState()}
    if algorithm.running is not None:
        parts["running"] = algorithm.running
    contents = Contents(actor_train.workers, policy.tokenizer, {"critic": critic.workers} if critic else {}, parts)
    checkpoints = build_checkpoints(config, folder, config.max_steps, contents)
    return AgenticPipeline(
        pipeline_config=config,
        actor_train=actor_train,
        actor_infer=policy.servers,
        reference=reference,
        critic=critic,
        train_rollout_scheduler=train_scheduler,
        val_rollout_scheduler=build_scheduler(config, policy, "val", pictures=pictures) if config.uses_validation else None,
        algorithm=algorithm,
        kl_ctrl=kl_ctrl,
        tokenizer=policy.tokenizer,
        weight_transfer=InProcessTransfer(
            [policy.servers],
            weights=strategy.weights,
            copies=policy.copies,
            on_weight_update=config.on_weight_update,
            watchdog=policy.watchdog,
            timeout_s=config.deadlines.weights_s,
        ),
        parity_gate=build_parity_gate(config, policy, actor_train, strategy.weights),
        event_loop=policy.event_loop,
        log=RunLog(build_trackers(config, folder, AGENTIC_COLUMNS, config.max_steps, is_quiet)),
        journal=Journal(folder.rollouts),
        pictures=pictures,
        folder=folder,
        checkpoints=checkpoints,
        interrupts=Interrupts(),
    )


def build_algorithm(config: AgenticConfig, kl_ctrl: KLController) -> Algorithm:
    """The credit and loss of `adv_estimator`, built in or a user's `module:Class`.

    Raises:
        NotAvailableError: it needs what this version doesn't have.
    """
    name = config.adv_estimator
    found = load_class(ESTIMATORS[name].entry if name in ESTIMATORS else name, "adv_estimator", ConfigError)
    algorithm: Algorithm = found(algorithm_settings(config), kl_ctrl)
    if "greedy_sibling" in algorithm.needs:
        raise NotAvailableError(f"adv_estimator {name} needs a greedy sibling, which this version doesn't have")
    return algorithm


def algorithm_settings(config: AgenticConfig) -> AlgorithmSettings:
    """The algorithm's keys of the config, under the same names.

    A user's own estimator is told only what the user set of `reward_normalization`: its defaults are its own.
    """
    is_built_in = config.adv_estimator in ESTIMATORS
    normalization = {
        f.name: getattr(config.reward_normalization, f.name)
        for f in fields(RewardNormalization)
        if is_built_in or config.is_set(f"reward_normalization.{f.name}")
    }
    values = {f.name: getattr(config, f.name) for f in fields(AlgorithmSettings) if f.name != "reward_normalization"}
    return AlgorithmSettings(**values, reward_normalization=RewardNormalization(**normalization))


def batch_plan(config: AgenticConfig, role_name: str) -> BatchPlan:
    """How a role's samples are cut into optimiser steps and micro-batches."""
    role = config.roles[role_name]
    return BatchPlan(
        samples_per_step=role.samples_per_optimizer_step,
        max_length=config.sequence_length,
        seed=config.seed,
        num_epochs=config.ppo_epochs,
        max_sequences=role.training_args.per_device_train_batch_size,
        max_tokens_train=role.max_tokens_per_microbatch_in_train if role.use_dynamic_batching_in_train else None,
        max_tokens_infer=role.max_tokens_per_microbatch_in_infer if role.use_dynamic_batching_in_infer else None,
        deadline_s=config.deadlines.train_s,
    )


def _train_strategy(config: AgenticConfig, name: str, model: PreTrainedModel, device: torch.device) -> TorchStrategy:
    role = config.roles[name]
    total_steps = config.num_training_steps(name) * config.optimizer_steps_per_batch(name)
    return TorchStrategy(
        model,
        optimizer=optimizer_settings(role.training_args, total_steps),
        temperature=config.sampling("train").temperature,
        max_grad_norm=config.max_grad_norm,
        dtype=parse_dtype(role.model_args.dtype),
        device=device,
        is_gradient_checkpointing=not role.model_args.disable_gradient_checkpointing,
    )


def _critic_strategy(config: AgenticConfig, device: torch.device) -> TorchStrategy:
    arguments = config.critic.model_args
    path, attention = arguments.model_name_or_path, arguments.attn_implementation
    return _train_strategy(config, "critic", load_value_model(path, device=device, attn_implementation=attention), device)


def _frozen_strategy(config: AgenticConfig, device: torch.device) -> TorchStrategy:
    arguments = config.reference.model_args
    model = load_model(arguments.model_name_or_path, device=device, attn_implementation=arguments.attn_implementation)
    temperature = config.sampling("train").temperature
    return TorchStrategy(model, temperature=temperature, dtype=parse_dtype(arguments.dtype), device=device)


def optimizer_settings(arguments: Any, total_steps: int) -> OptimizerSettings:
    """`training_args` of a role as the optimiser takes them."""
    return OptimizerSettings(
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        scheduler=arguments.lr_scheduler_type,
        warmup_steps=arguments.warmup_steps,
        warmup_ratio=arguments.warmup_ratio,
        total_steps=total_steps,
    )


def build_trackers(
    config: AgenticConfig | SFTConfig, folder: RunFolder, columns: Columns, num_steps: int, is_quiet: bool
) -> list[Tracker]:
    """`metrics.jsonl` always, and what `track_with` names; a quiet run prints no steps."""
    trackers: list[Tracker] = [JsonlTracker(folder.metrics)]
    if "tensorboard" in config.track_with:
        # Arguments stand under the tracker's name, or alone where there is only one tracker to take them.
        arguments = config.tracker_kwargs.get("tensorboard", config.tracker_kwargs)
        trackers.append(TensorBoardTracker(Path(arguments.get("log_dir", folder.tensorboard)), first_step=folder.num_done))
    if "stdout" in config.track_with and not is_quiet:
        view = stdout_tracker(config.exp_name, columns, num_steps, every=config.logging_steps, num_done=folder.num_done)
        trackers.append(view)
    return trackers


def build_checkpoints(config: AgenticConfig | SFTConfig, folder: RunFolder, num_steps: int, contents: Contents) -> Checkpoints:
    """Where and when the checkpoints of a run are saved, and what they hold."""
    path = checkpoints_folder(config, folder.path)
    return Checkpoints(path, config.save_steps, config.max_ckpt_to_keep, num_steps, contents, dump_yaml(config))


def _begin(config: AgenticConfig | SFTConfig, folder: RunFolder, pipeline: AgenticPipeline | SFTPipeline) -> None:
    """The last of a start: everything is built, so the run's files may be changed."""
    if folder.resumed_from is not None:
        pipeline.checkpoints.restore(folder.resumed_from)
    folder.begin(dump_yaml(config))


def start_run(config: AgenticConfig | SFTConfig) -> RunFolder:
    """Makes the run's folder, or opens it again, with its log.

    Raises:
        CheckpointError: `resume_from_checkpoint` asks for what isn't there or can't be continued.
    """
    folder, notes = open_run(config)
    with ExitStack() as on_error:
        on_error.callback(folder.discard)
        folder.open_log(Path(config.logging_dir) if config.logging_dir else None)
        for note in notes:
            logger.warning(note)
        on_error.pop_all()
    return folder


def set_profile(config: AgenticConfig | SFTConfig) -> None:
    """Seeds torch and says which profile of determinism holds.

    `deterministic: true` also makes torch refuse kernels that add up in no fixed order. On a CPU the embedded server and
    cooperative environments give bit-identical runs without it, as long as the number of threads stays the same.
    """
    torch.manual_seed(derive_seed(config.seed, "torch"))
    torch.use_deterministic_algorithms(config.deterministic)
    profile = "deterministic" if config.deterministic else "not asked to be deterministic"
    logger.info("profile: %s, %d threads, seed %d", profile, torch.get_num_threads(), config.seed)


def evaluate_model(
    config: AgenticConfig,
    model_path: str | None = None,
    num_episodes: int | None = None,
    on_start: Callable[[Applied], None] = log_applied,
) -> Evaluation:
    """Plays the config's validation tasks (the first `num_episodes`) with a saved model. `on_start` is told what is applied.

    Tasks, seeds and schedule are those of validation in training, so that the same weights give the same figure.
    """
    require(unavailable_for_evaluation(config))
    check_rollouts(config)
    policy = build_policy(config, choose_device(config), is_trained=False, model_path=model_path)
    pictures = build_pictures(config, "eval")
    try:
        scheduler = build_scheduler(config, policy, "val", pictures=pictures)
        on_start(applied_evaluation(config, policy.servers, scheduler))
        groups = scheduler.get_batch(num_episodes or config.val_batch_size)
    finally:
        policy.close()
    pictures.write(Path(model_path or config.actor_train.model_args.model_name_or_path).name, groups)
    return evaluate(groups)


def build_sft(config: SFTConfig, folder: RunFolder, is_quiet: bool = False) -> SFTPipeline:
    """The pipeline of one run of `turnwise sft`."""
    require(unavailable(config))
    set_profile(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = config.model_args
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    template = ChatTemplate(tokenizer)
    train_samples = encode_demonstrations(template, read_demonstrations(config.train_files), config.sequence_length)
    val_samples = encode_demonstrations(template, read_demonstrations(config.val_files or ()), config.sequence_length)
    every = config.samples_per_optimizer_step
    num_steps = config.num_epochs * -(-len(train_samples) // every)
    total_steps = min(num_steps, config.max_steps or num_steps)
    strategy = TorchStrategy(
        load_model(arguments.model_name_or_path, device=device, attn_implementation=arguments.attn_implementation),
        optimizer=optimizer_settings(config.training_args, total_steps),
        max_grad_norm=config.max_grad_norm,
        dtype=parse_dtype(arguments.dtype),
        device=device,
        is_gradient_checkpointing=not arguments.disable_gradient_checkpointing,
    )
    max_tokens = config.max_tokens_per_microbatch_in_train
    plan = BatchPlan(
        samples_per_step=every,
        max_length=config.sequence_length,
        seed=config.seed,
        max_sequences=config.training_args.per_device_train_batch_size,
        max_tokens_train=max_tokens if config.use_dynamic_batching_in_train else None,
        max_tokens_infer=max_tokens,
    )
    sft = ModelRole("sft", LocalCluster().spawn("sft", lambda: strategy), plan, Watchdog())
    contents = Contents(
        sft.workers, tokenizer, parts={"random": GlobalRandomState(), "demonstrations": Fingerprint(train_samples)}
    )
    checkpoints = build_checkpoints(config, folder, total_steps, contents)
    pipeline = SFTPipeline(
        pipeline_config=config,
        sft=sft,
        train_samples=train_samples,
        val_samples=val_samples,
        loss=CrossEntropy(),
        tokenizer=tokenizer,
        log=RunLog(build_trackers(config, folder, SFT_COLUMNS, total_steps, is_quiet)),
        folder=folder,
        checkpoints=checkpoints,
        interrupts=Interrupts(),
    )
    _begin(config, folder, pipeline)
    return logged(pipeline)


def encode_demonstrations(template: ChatTemplate, rows: Sequence[list[Message]], max_length: int) -> list[Sample]:
    """The rows as training samples.

    Raises:
        DataError: a row that is longer than `max_length`, by its number.
    """
    samples = [encode_demonstration(template, messages) for messages in rows]
    for number, sample in enumerate(samples, start=1):
        if sample.num_tokens > max_length:
            raise DataError(
                f"demonstration {number} has {sample.num_tokens} tokens, more than sequence_length {max_length}; "
                "raise sequence_length or shorten the row"
            )
    return samples
