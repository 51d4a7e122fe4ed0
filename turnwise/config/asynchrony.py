"""Checks the combinations of asynchronous training and redundant episodes with other settings."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.config.problems import Problem
from turnwise.config.resolve import streaming_obstacles
from turnwise.config.schema import AgenticConfig
from turnwise.spec import MAX_KEPT

UNBOUNDED_CUT = (
    "without a top_k the sampler doesn't say which tokens top_p or min_p left, and repetition_penalty changes each token's "
    "distribution: exp(old − sampled) is no importance ratio then. Sample with top_k 1 to "
    f"{MAX_KEPT} beside top_p and min_p, or with top_p 1, top_k 0, min_p 0; repetition_penalty must be 1"
)


def cut_sampling(config: AgenticConfig) -> Iterator[Problem]:
    """Comparisons with log-probs of the sampler that don't hold where sampling is cut."""
    sampling = config.sampling("train")
    uses_sampled = config.train_infer_correction or config.use_rollout_log_probs
    if sampling.is_truncated and not sampling.keeps_ids and uses_sampled:
        key = "train_infer_correction" if config.train_infer_correction else "use_rollout_log_probs"
        yield Problem.at(
            key,
            f"{UNBOUNDED_CUT}, or leave this out",
        )
    if sampling.keeps_ids and config.use_rollout_log_probs and config.add_token_level_kl:
        yield Problem.at(
            "use_rollout_log_probs",
            "true takes the sampler's log-probs, which are over the tokens that top_k left, and the KL of add_token_level_kl "
            "needs those over the whole vocabulary; leave one of the two out, or set top_k 0, top_p 1, min_p 0",
        )


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
    if config.sampling("train").is_truncated and not config.sampling("train").keeps_ids:
        yield Problem.at(
            "async_generation_ratio",
            f"{ratio} trains on samples that are up to {_staleness(config)} old, and {UNBOUNDED_CUT}, or train "
            "synchronously (async_generation_ratio: 0)",
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
