"""Builds the pipeline of supervised fine-tuning from its config."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from turnwise.build.lora import prepare_training
from turnwise.build.roles import optimizer_settings
from turnwise.build.run import begin, build_checkpoints, build_trackers, set_profile
from turnwise.build.run_table import info_of, logged
from turnwise.chat.demonstration import encode_demonstration
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.cluster.local import LocalCluster
from turnwise.config import SFTConfig, require, unavailable
from turnwise.data.demonstrations import Row, read_rows
from turnwise.errors import ChatTemplateError, DataError
from turnwise.models.load import load_model, load_tokenizer, parse_dtype
from turnwise.pipelines.checkpoints import Contents, Fingerprint
from turnwise.pipelines.interrupt import Interrupts
from turnwise.pipelines.roles import BatchPlan, ModelRole
from turnwise.pipelines.run_folder import RunFolder
from turnwise.pipelines.sft import SFTPipeline
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.tracking.metric_columns import SFT_COLUMNS
from turnwise.tracking.run_log import RunLog
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.random_state import GlobalRandomState
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample


def build_sft(config: SFTConfig, folder: RunFolder, is_quiet: bool = False) -> SFTPipeline:
    """The pipeline of one run of `turnwise sft`."""
    require(unavailable(config))
    set_profile(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = config.model_args
    path, trust = arguments.model_name_or_path, arguments.trust
    tokenizer = load_tokenizer(path, trust)
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs))
    train_samples = encode_demonstrations(template, read_rows(config.train_files), config.sequence_length)
    val_samples = encode_demonstrations(template, read_rows(config.val_files or ()), config.sequence_length)
    every = config.samples_per_optimizer_step
    num_steps = config.num_epochs * -(-len(train_samples) // every)
    total_steps = min(num_steps, config.max_steps or num_steps)
    stopwatch = Stopwatch()
    model = load_model(path, device=device, attn_implementation=arguments.attn_implementation, trust=trust)
    strategy = TorchStrategy(
        model,
        adapters=prepare_training(arguments, model, tokenizer, folder.path, config.seed),
        optimizer=optimizer_settings(config.training_args, total_steps),
        max_grad_norm=config.max_grad_norm,
        dtype=parse_dtype(arguments.dtype),
        device=device,
        is_gradient_checkpointing=not arguments.disable_gradient_checkpointing,
        stopwatch=stopwatch,
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
    sft = ModelRole("sft", LocalCluster().spawn("sft", lambda _: strategy), plan, stopwatch)
    contents = Contents(
        sft.workers,
        tokenizer,
        parts={"random": GlobalRandomState(), "demonstrations": Fingerprint(train_samples)},
        num_bytes=info_of(sft).saved_bytes,
    )
    checkpoints = build_checkpoints(config, folder, total_steps, contents)
    pipeline = SFTPipeline(
        pipeline_config=config,
        sft=sft,
        train_samples=train_samples,
        val_samples=val_samples,
        loss=CrossEntropy(),
        tokenizer=tokenizer,
        log=RunLog(build_trackers(config, folder, SFT_COLUMNS, total_steps, is_quiet, stopwatch)),
        folder=folder,
        checkpoints=checkpoints,
        interrupts=Interrupts(),
    )
    begin(config, folder, pipeline)
    return logged(pipeline)


def encode_demonstrations(template: ChatTemplate, rows: Iterable[Row], max_length: int) -> list[Sample]:
    """The rows as training samples.

    Raises:
        DataError: a row that can't be learnt from or is longer than `max_length`, with its file and line.
    """
    samples = []
    for place, messages in rows:
        try:
            sample = encode_demonstration(template, messages, max_length=max_length)
        except (DataError, ChatTemplateError) as error:
            raise DataError(f"{place}: {error}") from error
        if sample.num_tokens > max_length:
            raise DataError(
                f"{place}: has {sample.num_tokens} tokens, more than sequence_length {max_length}; "
                "raise sequence_length or shorten the row"
            )
        samples.append(sample)
    return samples
