"""The table of settings at the start of a run, from its config and from what the built objects report about
themselves."""

import logging

import torch

from turnwise.assemble.reward_model import ModelReward
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.config import AgenticConfig, SettingsTable, SFTConfig, describe
from turnwise.config.show.describe import profile
from turnwise.config.show.model_rows import IN_POLICY, start_of
from turnwise.config.show.played_rows import environments, validation
from turnwise.costs.model import bytes_text
from turnwise.data.rewards import RewardManager
from turnwise.errors import counted
from turnwise.lifecycle.checkpoints import Checkpoints
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.model_role import ModelRole
from turnwise.pipelines.sft import SFTPipeline
from turnwise.protocols import PolicyServer
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.source import RolloutSource
from turnwise.runtime.info import LoadedModel, ServerInfo, StrategyInfo
from turnwise.types import Split

logger = logging.getLogger(__name__)


def log_settings(table: SettingsTable) -> None:
    logger.info("what this run applies\n%s", table.render())


def settings_table(pipeline: AgenticPipeline | SFTPipeline) -> SettingsTable:
    """The table of a built pipeline, with the sizes, dtypes, attention kernels and devices of what was
    built."""
    config, cluster = pipeline.pipeline_config, pipeline.cluster
    built = _sft(pipeline) if isinstance(pipeline, SFTPipeline) else _agentic(pipeline)
    placement = cluster.placement
    if placement.trains_apart:
        built["placement"] = placement.describe()
    built |= {"checkpoints": _checkpoints(pipeline.checkpoints), "profile": _profile(config), "memory": ""}
    return describe(config, placement, built)


def play_table(
    config: AgenticConfig, server: PolicyServer, source: RolloutSource, split: Split, sampled: str
) -> SettingsTable:
    """The table of `turnwise eval` and `turnwise rollout`. `sampled` describes how tokens are sampled."""
    info = server.info()
    episodes = f"{source.describe()}, each of at most {info.max_length} tokens"
    rows = [("model", _model(info.model)), ("server", _server(info)), *environments(config, split)]
    return SettingsTable(
        [*rows, ("episodes", episodes), ("sampling", sampled), ("profile", _profile(config))]
    )


def _agentic(pipeline: AgenticPipeline) -> dict[str, str]:
    config, source, cluster = pipeline.pipeline_config, pipeline.train_rollout_scheduler, pipeline.cluster
    actor = info_of(pipeline.actor_train)
    start = start_of(config.actor_train.model_args.model_name_or_path)
    if pipeline.checkpoints.num_done:
        start = f"checkpoint-{pipeline.checkpoints.num_done}, in a run that began with {start}"
    built = {
        "model": f"{start}: {_trained(actor.model)}",
        "actor_train": _strategy(actor),
        "optimiser": actor.optimizer,
        "actor_infer": _server(pipeline.actor_infer.info(), actor),
        "steps": f"{pipeline.checkpoints.num_steps}, {source.describe()}",
        "adapters": actor.adapters,
    }
    if isinstance(val := pipeline.val_rollout_scheduler, RolloutScheduler):
        built["validation"] = validation(config, val.num_trajectories(config.val_batch_size))
    if pipeline.critic:
        critic = info_of(pipeline.critic)
        alone = (
            f", alone in the first {counted(config.critic_warmup, 'step')}" if config.critic_warmup else ""
        )
        built |= {
            "critic": f"{_trained(critic.model)}, {_strategy(critic)}{alone}",
            "critic's": critic.optimizer,
        }
        built["its adapters"] = critic.adapters
    if pipeline.reference:
        start, reference = (
            start_of(config.reference.model_args.model_name_or_path),
            info_of(pipeline.reference),
        )
        built["reference"] = IN_POLICY if pipeline.reference.is_base else f"{start}: {_strategy(reference)}"
    if isinstance(cluster, ProcessCluster) and config.plays_ahead:
        threads = cluster.num_threads
        built["threads"] = f"{threads.both}, of which {threads.train} train and {threads.rollout} play"
    for weighted in source.score.rewards if isinstance(source.score, RewardManager) else ():
        if isinstance(weighted.reward, ModelReward):
            built["reward"] = _strategy(info_of(weighted.reward.role))
    return built


def _sft(pipeline: SFTPipeline) -> dict[str, str]:
    config, plan, info = pipeline.pipeline_config, pipeline.sft.plan, info_of(pipeline.sft)
    samples, tokens = (
        len(pipeline.train_samples),
        sum(sample.num_trained for sample in pipeline.train_samples),
    )
    return {
        "model": f"{start_of(config.model_args.model_name_or_path)}: {_trained(info.model)}",
        "training": _strategy(info),
        "optimiser": info.optimizer,
        "demonstrations": f"{samples} of at most {plan.max_length} tokens, {tokens:,} tokens trained on",
        "steps": f"{pipeline.num_steps} of {plan.samples_per_step} samples, "
        f"{counted(config.num_epochs, 'epoch')}",
        "adapters": info.adapters,
    }


def info_of(role: ModelRole) -> StrategyInfo:
    return role.workers.call("info", route="rank0").result()


def _model(model: LoadedModel) -> str:
    return f"{model.architecture}, {model.num_parameters:,} parameters"


def _trained(model: LoadedModel) -> str:
    share = model.num_trainable / model.num_parameters
    return f"{_model(model)}, {model.num_trainable:,} trainable" + (f" ({share:.2%})" if share < 1 else "")


def _strategy(info: StrategyInfo) -> str:
    model = info.model
    recomputed = ", activations computed twice" if info.recomputes_activations else ""
    return (
        f"{model.device}, weights {model.dtype}, computes in {info.compute_dtype}, attention "
        f"{model.attention}{recomputed}"
    )


def _server(info: ServerInfo, trainer: StrategyInfo | None = None) -> str:
    parts = [info.engine, info.model.device, info.model.dtype]
    if trainer:
        copy = "a copy with the adapters merged" if trainer.adapters else "a copy of the parameters"
        parts.append("the trainer's own parameters" if info.model.address == trainer.model.address else copy)
    parts.append(f"at most {info.max_concurrency} requests at once")
    cache = (
        f"cache of at most {bytes_text(info.cache_bytes)}"
        if info.cache_bytes
        else "nothing cached between requests"
    )
    return ", ".join([*parts, cache])


def _checkpoints(checkpoints: Checkpoints) -> str:
    every = (
        f"every {counted(checkpoints.save_steps, 'step')} and at the end"
        if checkpoints.save_steps
        else "at the end"
    )
    retention = f"the newest {checkpoints.max_to_keep} kept" if checkpoints.max_to_keep else "all kept"
    return (
        f"{every}, about {bytes_text(checkpoints.contents.num_bytes)} each, {retention}, in "
        f"{checkpoints.path}"
    )


def _profile(config: AgenticConfig | SFTConfig) -> str:
    return f"{profile(config)}, {counted(torch.get_num_threads(), 'thread')}"
