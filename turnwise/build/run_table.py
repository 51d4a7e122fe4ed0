"""The table at a run's start, read off the objects that were built for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

import torch

from turnwise.build.reward_model import ModelReward
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.config import AgenticConfig, Applied, SFTConfig, ineffective
from turnwise.config.describe import Row, algorithm_rows, asynchronous, sampling, tags_of, tracking, validation
from turnwise.config.rows import data_rows
from turnwise.config.smaller import bytes_text
from turnwise.data.rewards import RewardStage
from turnwise.errors import counted
from turnwise.model_folder import base_of_adapter
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.checkpoints import Checkpoints
from turnwise.pipelines.roles import BatchPlan, ModelRole
from turnwise.pipelines.sft import SFTPipeline
from turnwise.protocols import PolicyServer
from turnwise.rollout.source import RolloutSource
from turnwise.runtime_info import LoadedModel, ServerInfo, StrategyInfo
from turnwise.types import Split

P = TypeVar("P", AgenticPipeline, SFTPipeline)

logger = logging.getLogger(__name__)


def logged(pipeline: P) -> P:
    """Writes the pipeline's table into the log and returns the pipeline."""
    log_applied(applied_settings(pipeline))
    return pipeline


def log_applied(applied: Applied) -> None:
    logger.info("what this run applies\n%s", applied.render())


def applied_settings(pipeline: AgenticPipeline | SFTPipeline) -> Applied:
    """The table of a built pipeline, with its objects' sizes, dtypes, kernels and devices."""
    rows = _sft_rows(pipeline) if isinstance(pipeline, SFTPipeline) else _agentic_rows(pipeline)
    return Applied(list(rows), ineffective(pipeline.pipeline_config))


def applied_play(config: AgenticConfig, server: PolicyServer, source: RolloutSource, split: Split, sampled: str) -> Applied:
    """The table of `turnwise eval` and `turnwise rollout`, which train nothing; `sampled` says how tokens are drawn."""
    info = server.info()
    episodes = f"{source.describe()}, each of at most {info.max_length} tokens"
    rows = [("model", _model(info.model)), ("server", _server(info)), *_environments(config, split)]
    return Applied([*rows, ("episodes", episodes), ("sampling", sampled), ("profile", _profile(config))])


def _agentic_rows(pipeline: AgenticPipeline) -> Iterator[Row]:
    config, role = pipeline.pipeline_config, pipeline.actor_train
    actor = info_of(role)
    yield "model", f"{_start(config.actor_train.model_args.model_name_or_path)}: {_trained(actor.model)}"
    yield from _adapters(actor)
    yield "actor_train", _strategy(actor)
    yield "optimiser", actor.optimizer
    if pipeline.critic:
        critic = info_of(pipeline.critic)
        alone = f", alone in the first {counted(config.critic_warmup, 'step')}" if config.critic_warmup else ""
        yield "critic", f"{_trained(critic.model)}, {_strategy(critic)}{alone}"
        yield from _adapters(critic, "its adapters")
        yield "its optimiser", critic.optimizer
    if pipeline.reference and pipeline.reference.is_base:
        yield "reference", "the policy's own weights with the adapter off"
    elif pipeline.reference:
        reference = info_of(pipeline.reference)
        yield "reference", f"{_start(config.reference.model_args.model_name_or_path)}: {_strategy(reference)}"
    yield "actor_infer", _server(pipeline.actor_infer.info(), actor)
    yield from _placement(pipeline)
    if isinstance(pipeline.cluster, ProcessCluster) and config.plays_ahead:
        yield "asynchronous", f"{_split(pipeline.cluster)}; {asynchronous(config)}"
    yield from _environments(config, "train")
    yield from data_rows(config)
    yield from _reward_model(pipeline.train_rollout_scheduler.score)
    yield "steps", f"{pipeline.checkpoints.num_steps}, each {_step(pipeline)}"
    yield "micro-batches", _micro_batches(role.plan)
    yield from algorithm_rows(config)
    yield "sampling", sampling(config, "train")
    scheduler = pipeline.val_rollout_scheduler
    yield "validation", validation(config) + (f", {scheduler.describe()}" if scheduler else "")
    yield "checkpoints", _checkpoints(pipeline.checkpoints)
    yield "profile", _profile(config)
    yield "tracking", tracking(config)


def _sft_rows(pipeline: SFTPipeline) -> Iterator[Row]:
    config, plan = pipeline.pipeline_config, pipeline.sft.plan
    info = info_of(pipeline.sft)
    yield "model", f"{_start(config.model_args.model_name_or_path)}: {_trained(info.model)}"
    yield from _adapters(info)
    yield "training", _strategy(info)
    yield from _placement(pipeline)
    yield "optimiser", info.optimizer
    tokens = sum(sample.num_trained for sample in pipeline.train_samples)
    yield "demonstrations", f"{len(pipeline.train_samples)} of at most {plan.max_length} tokens, {tokens:,} tokens trained on"
    yield "steps", f"{pipeline.num_steps} of {plan.samples_per_step} samples, {counted(config.num_epochs, 'epoch')}"
    yield "micro-batches", _micro_batches(plan)
    every = f"{counted(len(pipeline.val_samples), 'demonstration')} every {counted(config.eval_steps, 'step')} and at the end"
    yield "validation", every if pipeline.val_samples else "never (no val_files)"
    yield "checkpoints", _checkpoints(pipeline.checkpoints)
    yield "profile", _profile(config)
    yield "tracking", tracking(config)


def _reward_model(score: object) -> Iterator[Row]:
    for weighted in score.rewards if isinstance(score, RewardStage) else ():
        if isinstance(weighted.reward, ModelReward):
            yield "reward", _strategy(info_of(weighted.reward.role))


def info_of(role: ModelRole) -> StrategyInfo:
    """The strategy's own description of a role."""
    info: StrategyInfo = role.workers.call("info", route="rank0").result()
    return info


def _model(model: LoadedModel) -> str:
    return f"{model.architecture}, {model.num_parameters:,} parameters"


def _trained(model: LoadedModel) -> str:
    share = model.num_trainable / model.num_parameters
    return f"{_model(model)}, {model.num_trainable:,} trainable" + (f" ({share:.2%})" if share < 1 else "")


def _start(path: str) -> str:
    base = base_of_adapter(path)
    return path if base is None else f"{path}, an adapter merged into {base}"


def _adapters(info: StrategyInfo, title: str = "adapters") -> Iterator[Row]:
    if info.adapters:
        yield title, info.adapters


def _strategy(info: StrategyInfo) -> str:
    model = info.model
    recomputed = ", activations computed twice" if info.recomputes_activations else ""
    return f"{model.device}, weights {model.dtype}, computes in {info.compute_dtype}, attention {model.attention}{recomputed}"


def _server(info: ServerInfo, trainer: StrategyInfo | None = None) -> str:
    parts = [info.engine, info.model.device, info.model.dtype]
    if trainer:
        copy = "a copy with the adapters merged" if trainer.adapters else "a copy of the parameters"
        parts.append("the trainer's own parameters" if info.model.address == trainer.model.address else copy)
    parts.append(f"at most {info.max_concurrency} requests at once")
    kept = f"cache of at most {bytes_text(info.cache_bytes)}" if info.cache_bytes else "nothing cached between requests"
    return ", ".join([*parts, kept])


def _environments(config: AgenticConfig, split: Split) -> Iterator[Row]:
    for tag in config.env_manager(split).env_tags:
        env = config.custom_envs[tag]
        limits = f"at most {counted(env.max_steps, 'action')} of {config.max_new_tokens(split, tag)} tokens"
        yield f"env {tag}", f"{env.env_type} by {env.agent_name}, mode {env.mode}, {limits}"


def _step(pipeline: AgenticPipeline) -> str:
    config, plan = pipeline.pipeline_config, pipeline.actor_train.plan
    batch, source = config.rollout_batch_size, pipeline.train_rollout_scheduler
    num_steps = plan.num_optimizer_steps(batch)
    size = source.group_size
    groups = f"{counted(batch, 'trajectory')} = {counted(batch // size, 'group')} × {counted(size, 'sibling')}"
    most = batch * config.max_samples_per_trajectory
    steps = f"{num_steps} to {plan.num_optimizer_steps(most)}" if most > batch else f"{num_steps}"
    optimizer_steps = f"optimiser steps × samples = {steps} × {min(plan.samples_per_step, most)}"
    return f"{groups} of {tags_of(config.train_env_manager)}, {source.describe()}; {optimizer_steps}"


def _micro_batches(plan: BatchPlan) -> str:
    train, infer = (_limit(plan, tokens) for tokens in (plan.max_tokens_train, plan.max_tokens_infer))
    return f"{train}; forward passes {infer}; contexts of at most {plan.max_length} tokens"


def _limit(plan: BatchPlan, max_tokens: int | None) -> str:
    return f"up to {plan.max_sequences} samples" if max_tokens is None else f"up to {max_tokens} tokens"


def _checkpoints(checkpoints: Checkpoints) -> str:
    every = f"every {counted(checkpoints.save_steps, 'step')} and at the end" if checkpoints.save_steps else "at the end"
    kept = f"the newest {checkpoints.max_to_keep} kept" if checkpoints.max_to_keep else "all kept"
    size = f"about {bytes_text(checkpoints.num_bytes)} each, "
    return f"{every}, {size}{kept}, in {checkpoints.path}"


def _placement(pipeline: AgenticPipeline | SFTPipeline) -> Iterator[Row]:
    if isinstance(pipeline.cluster, ProcessCluster) and pipeline.cluster.placement.roles:
        yield "placement", pipeline.cluster.placement.describe()


def _split(cluster: ProcessCluster) -> str:
    threads = cluster.num_threads
    return f"of {threads.both} threads {threads.train} train and {threads.rollout} play"


def _profile(config: AgenticConfig | SFTConfig) -> str:
    is_strict = torch.are_deterministic_algorithms_enabled()
    is_ahead = isinstance(config, AgenticConfig) and config.plays_ahead
    promise = "deterministic" + (", bit-identical when it is replayed (train --replay)" if is_ahead else "")
    profile = promise if is_strict else "bit-identity isn't promised (deterministic: true asks for it)"
    return f"{profile}, seed {config.seed}, {counted(torch.get_num_threads(), 'thread')}"
