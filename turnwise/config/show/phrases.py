"""The phrases in which a run's table says how it learns: rows `advantages`, `KL` and `asynchronous`."""

from collections.abc import Iterator

from turnwise.config.schema.agentic import AgenticConfig


def advantages(config: AgenticConfig) -> Iterator[str]:
    """How scores become advantages."""
    yield config.adv_estimator
    yield _normalization(config)
    if not config.estimator.is_own:
        yield from _returns(config)
    if config.whiten_advantages or config.estimator.whitens_advantages:
        yield "advantages whitened"
    if config.reward_clip:
        yield f"rewards clipped to ±{config.reward_clip:g}"
    if config.advantage_clip:
        yield f"advantages clipped to ±{config.advantage_clip:g}"


def _normalization(config: AgenticConfig) -> str:
    normalization = config.reward_normalization
    if config.estimator.normalization == "own":
        return "scores centred in its own way"
    if not normalization.changes_scores:
        return "scores as they are"
    mean, deviation = normalization.statistics
    return f"{normalization.method} over {normalization.grouping} (mean: {mean}, deviation: {deviation})"


def _returns(config: AgenticConfig) -> Iterator[str]:
    """How a built-in estimator sums rewards over tokens, turns and episodes."""
    estimator = config.estimator
    if estimator.has_td_errors:
        yield f"γ {config.gamma:g} and λ {config.lambd:g} a {config.gae_granularity}"
    elif estimator.discounts:
        yield f"γ {config.gamma:g}"
    if estimator.has_step_returns:
        yield f"step returns with γ {config.step_reward_gamma:g} a turn"
    if estimator.mixes_step_advantages:
        yield f"{config.episode_reward_weight:g} × episode + {config.step_reward_weight:g} × step"


def kl(config: AgenticConfig) -> Iterator[str]:
    """Where a KL to the reference is taken."""
    if config.add_token_level_kl:
        in_reward = f"{config.init_kl_coef:g} × {config.kl_penalty} from the reward"
        if config.target_kl:
            in_reward += f", adapted to {config.target_kl:g} nats per token"
        yield in_reward
    if config.use_kl_loss:
        yield f"{config.kl_loss_coef:g} × {config.kl_loss_type} in the loss"
    if not config.needs_reference:
        yield "none, so no reference model"
    elif not (config.add_token_level_kl or config.use_kl_loss):
        yield "none; the reference's log-probs are recorded only"


def stale_tokens(config: AgenticConfig) -> str:
    """How tokens are trained on that an older policy has sampled."""
    correction = config.train_infer_correction
    if config.use_rollout_log_probs:
        return "ratios are to the policies that sampled"
    if correction is not None and correction.is_enabled:
        return "stale tokens are corrected by train_infer_correction"
    return "stale tokens are trained on as they are (train_infer_correction corrects them)"
