"""Checks the combinations of asynchronous training and redundant episodes with other settings."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.config.problems import Problem
from turnwise.config.resolve import streaming_obstacles
from turnwise.config.schema import AgenticConfig


def asynchrony(config: AgenticConfig) -> Iterator[Problem]:
    """Settings under which stale samples can't be corrected, or results would wrongly depend on time."""
    if config.val_env_manager.group_size_redundancy:
        message = (
            "would score the quickest episodes only, which are no fair sample of the policy's; leave it out for validation"
        )
        yield Problem.at("val_env_manager.group_size_redundancy", message)
    ratio = config.async_generation_ratio
    if ratio == 0:
        return
    if config.sampling("train").is_truncated:
        yield Problem.at(
            "async_generation_ratio",
            f"{ratio} trains on samples that are up to {_staleness(config)} old, and with top_k, top_p or "
            "repetition_penalty on their log-probs are those of a cut distribution: exp(old − sampled) is no importance "
            "ratio. A correction for cut sampling isn't in this version: sample with top_p 1, top_k 0, repetition_penalty 1, "
            "or train synchronously (async_generation_ratio: 0)",
        )
    for obstacle in streaming_obstacles(config) if config.stream_training else ():
        yield Problem.at("stream_training", f"true trains on the groups of a step as they end, but {obstacle}; leave it out")
    if config.deterministic and config.stale_groups == "drop":
        yield Problem.at(
            "stale_groups", "drop lets time decide what is trained on, which deterministic: true forbids; use wait"
        )


def _staleness(config: AgenticConfig) -> str:
    """The bound of staleness, with its arithmetic."""
    ratio, every = config.async_generation_ratio, config.actor_train.model_update_frequency
    if every == 1:
        return f"{ratio} steps"
    return f"{ratio + every - 1} steps ({ratio} + model_update_frequency {every} − 1)"
