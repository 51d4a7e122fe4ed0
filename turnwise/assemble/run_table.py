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
    config = pipeline.pipeline_config
    placement = pipeline.cluster.placement
    built = _sft(pipeline) if isinstance(pipeline, SFTPipeline) else _agentic(pipeline)
    if placement.trains_apart:
        built["placement"] = placement.describe()
    built["checkpoints"] = _checkpoints(pipeline.checkpoints)
    built["profile"] = _profile(config)
    built["memory"] = ""
    return describe(config, placement, built)


def play_table(
    config: AgenticConfig,
    server: PolicyServer,
    source: RolloutSource,
    split: Split,
    sampled: str,
) -> SettingsTable:
    """The table of `turnwise eval` and `turnwise rollout`. `sampled` describes how tokens are sampled."""
    info = server.info()
    episodes = f"{source.describe()}, each of at most {info.max_length} tokens"
    return SettingsTable(
        [
            ("model", _model(info.model)),
            ("server", _server(info)),
            *environments(config, split),
            ("episodes", episodes),
            ("sampling", sampled),
            ("profile", _profile(config)),
        ]
    )


def _agentic(pipeline: AgenticPipeline) -> dict[str, str]:
    config = pipeline.pipeline_config
    source = pipeline.train_rollout_scheduler
    cluster = pipeline.cluster
    actor = info_of(pipeline.actor_train)
    start = start_of(config.actor_train.model_args.model_name_or_path)
    if pipeline.checkpoints.num_done:
        start = f"checkpoint-{pipeline.checkpoints.num_done}, in a run that began with {start}"
    built = {
        "model": f"{start}: {_trained(actor.model)}",
        "actor_train": _strategy(actor),
        "optimiser": actor.optimizer,
        "actor_infer": _server(pipeline.actor_infer.info(), actor),
        "weights": pipeline.weight_transfer.describe(),
        "steps": f"{pipeline.checkpoints.num_steps}, {source.describe()}",
        "adapters": actor.adapters,
    }
    val_scheduler = pipeline.val_rollout_scheduler
    if isinstance(val_scheduler, RolloutScheduler):
        built["validation"] = validation(config, val_scheduler.num_trajectories(config.val_batch_size))
    if pipeline.critic:
        critic = info_of(pipeline.critic)
        built["critic"] = f"{_trained(critic.model)}, {_strategy(critic)}"
        if config.critic_warmup:
            built["critic"] += f", alone in the first {counted(config.critic_warmup, 'step')}"
        built["critic's"] = critic.optimizer
        built["its adapters"] = critic.adapters
    if pipeline.reference:
        start = start_of(config.reference.model_args.model_name_or_path)
        built["reference"] = f"{start}: {_strategy(info_of(pipeline.reference))}"
        if pipeline.reference.is_base:
            built["reference"] = IN_POLICY
    if isinstance(cluster, ProcessCluster) and config.plays_ahead:
        threads = cluster.num_threads
        built["threads"] = f"{threads.total}, of which {threads.train} train and {threads.rollout} play"
    if isinstance(source.score, RewardManager):
        for weighted in source.score.rewards:
            if isinstance(weighted.reward, ModelReward):
                built["reward"] = _strategy(info_of(weighted.reward.role))
    return built


def _sft(pipeline: SFTPipeline) -> dict[str, str]:
    config = pipeline.pipeline_config
    plan = pipeline.sft.plan
    info = info_of(pipeline.sft)
    start = start_of(config.model_args.model_name_or_path)
    samples = pipeline.train_samples
    num_trained = sum(sample.num_trained for sample in samples)
    epochs = counted(config.num_epochs, "epoch")
    return {
        "model": f"{start}: {_trained(info.model)}",
        "training": _strategy(info),
        "optimiser": info.optimizer,
        "demonstrations": (
            f"{len(samples)} of at most {plan.max_length} tokens, {num_trained:,} tokens trained on"
        ),
        "steps": f"{pipeline.num_steps} of {plan.samples_per_step} samples, {epochs}",
        "adapters": info.adapters,
    }


def info_of(role: ModelRole) -> StrategyInfo:
    return role.workers.call("info", route="rank0").result()


def _model(model: LoadedModel) -> str:
    return f"{model.architecture}, {model.num_parameters:,} parameters"


def _trained(model: LoadedModel) -> str:
    text = f"{_model(model)}, {model.num_trainable:,} trainable"
    share = model.num_trainable / model.num_parameters
    if share < 1:
        text += f" ({share:.2%})"
    return text


def _strategy(info: StrategyInfo) -> str:
    model = info.model
    text = f"{model.device}, weights {model.dtype}, computes in {info.compute_dtype}"
    text += f", attention {model.attention}"
    if info.recomputes_activations:
        text += ", activations computed twice"
    return text


def _server(info: ServerInfo, trainer: StrategyInfo | None = None) -> str:
    parts = [info.engine, info.model.device, info.model.dtype]
    if trainer:
        parts.append(_parameters(info, trainer))
    parts.append(f"at most {info.max_concurrency} requests at once")
    if info.cache_bytes:
        parts.append(f"cache of at most {bytes_text(info.cache_bytes)}")
    else:
        parts.append("nothing cached between requests")
    return ", ".join(parts)


def _parameters(server: ServerInfo, trainer: StrategyInfo) -> str:
    """Whose parameters the server reads."""
    if server.model.address == trainer.model.address:
        return "the trainer's own parameters"
    if trainer.adapters:
        return "a copy with the adapters merged"
    return "a copy of the parameters"


def _checkpoints(checkpoints: Checkpoints) -> str:
    interval = "at the end"
    if checkpoints.save_steps:
        interval = f"every {counted(checkpoints.save_steps, 'step')} and at the end"
    retention = "all kept"
    if checkpoints.max_to_keep:
        retention = f"the newest {checkpoints.max_to_keep} kept"
    size = bytes_text(checkpoints.contents.num_bytes)
    return f"{interval}, about {size} each, {retention}, in {checkpoints.path}"


def _profile(config: AgenticConfig | SFTConfig) -> str:
    return f"{profile(config)}, {counted(torch.get_num_threads(), 'thread')}"
