"""Builds the pipeline of supervised fine-tuning from its config."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from turnwise.assemble.cluster import build_cluster
from turnwise.assemble.placement import place_here, prepare_run
from turnwise.assemble.ray import open_hosts
from turnwise.assemble.run import begin, build_checkpoints, build_trackers, set_profile
from turnwise.assemble.run_table import info_of, log_settings, settings_table
from turnwise.assemble.strategies import trained_strategy
from turnwise.assemble.whole_run import whole_run
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import SFTConfig, require, unavailable
from turnwise.examine.demonstrations import encode_all
from turnwise.examine.examined import ExaminedSFT
from turnwise.lifecycle.by_validation import ByValidation
from turnwise.lifecycle.checkpoints import Contents
from turnwise.lifecycle.fingerprint import Fingerprint
from turnwise.lifecycle.interrupt import Interrupts
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.models.load import load_tokenizer
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.pipelines.sft import SFTPipeline
from turnwise.protocols import Stateful
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.tracking.metric_columns import SFT_COLUMNS
from turnwise.tracking.run_log import RunLog
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.state import GlobalRandomState


def build_sft(
    examined: ExaminedSFT,
    folder: RunFolder,
    placement: Placement | None = None,
    is_quiet: bool = False,
) -> SFTPipeline:
    """The pipeline of one run of `turnwise sft`. `placement` is that on this machine, the default."""
    config = examined.config
    require(unavailable(config))
    set_profile(config)
    placement = placement or place_here(config)
    arguments = config.model_args
    tokenizer = load_tokenizer(arguments.model_name_or_path, arguments.trust)
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs))
    train_samples = encode_all(config, template, "train_files", examined.demonstrations("train_files"))
    val_samples = encode_all(config, template, "val_files", examined.demonstrations("val_files"))
    num_steps = config.num_epochs * -(-len(train_samples) // config.samples_per_optimizer_step)
    total_steps = min(num_steps, config.max_steps or num_steps)
    event_loop = WatchedRunner()
    with ExitStack() as on_error:
        on_error.callback(event_loop.close)
        prepare_run(placement)
        hosts = open_hosts(config, placement, event_loop.watchdog, event_loop.stopwatch)
        on_error.callback(hosts.close)
        cluster = build_cluster(config, placement, event_loop, hosts)
        on_error.callback(cluster.shutdown)
        strategy = partial(trained_strategy, config, "sft", total_steps, tokenizer, folder.path)
        workers = cluster.spawn("sft", strategy)
        is_sharded = config.strategy_args.is_sharded
        sft = ModelRole("sft", workers, _batch_plan(config), event_loop.stopwatch, is_sharded=is_sharded)
        by_validation = ByValidation(config, folder.best)
        parts: dict[str, Stateful] = {
            "random": GlobalRandomState(),
            "demonstrations": Fingerprint(train_samples),
            "by_validation": by_validation,
        }
        contents = Contents(sft, tokenizer, parts=parts, num_bytes=info_of(sft).saved_bytes)
        stopwatch = event_loop.stopwatch
        trackers = build_trackers(config, folder, SFT_COLUMNS, total_steps, is_quiet, stopwatch)
        pipeline = SFTPipeline(
            pipeline_config=config,
            sft=sft,
            train_samples=train_samples,
            val_samples=val_samples,
            loss=CrossEntropy(),
            tokenizer=tokenizer,
            event_loop=event_loop,
            cluster=cluster,
            log=RunLog(trackers),
            folder=folder,
            checkpoints=build_checkpoints(config, folder, total_steps, contents),
            by_validation=by_validation,
            interrupts=Interrupts(),
        )
        begin(config, folder, pipeline)
        on_error.pop_all()
    log_settings(settings_table(pipeline))
    return pipeline


def fine_tune(examined: ExaminedSFT, is_quiet: bool = False) -> Path:
    """Runs supervised fine-tuning from start to end, and returns the folder of the model."""
    with whole_run(examined.config, partial(build_sft, examined, is_quiet=is_quiet), is_quiet) as pipeline:
        pipeline.run()
    model = pipeline.checkpoints.newest
    assert model is not None, "a run that ends well saves after its last step"
    return model


def _batch_plan(config: SFTConfig) -> BatchPlan:
    max_tokens = config.max_tokens_per_microbatch_in_train
    max_tokens_train = None
    if config.use_dynamic_batching_in_train:
        max_tokens_train = max_tokens
    return BatchPlan(
        samples_per_step=config.samples_per_optimizer_step,
        max_length=config.sequence_length,
        seed=config.seed,
        max_sequences=config.training_args.per_device_train_batch_size,
        max_tokens_train=max_tokens_train,
        max_tokens_infer=max_tokens,
    )
