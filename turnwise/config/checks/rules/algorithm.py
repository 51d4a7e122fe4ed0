"""Rules of the algorithm: scores, sampling, filters, and the KL to the reference."""

from turnwise.config.checks.rules.rule import Rule
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.spec import MAX_KEPT

_GREEDY = (
    "training samples greedily (temperature 0, or do_sample false), and greedy tokens can't be trained on"
)


def _hides_candidates(config: AgenticConfig) -> str:
    """Why log-probs of sampler and trainer can't be compared if sampling is truncated without a record of the
    candidates."""
    sampling = config.train_sampling
    return (
        f"with top_k {sampling.top_k} and repetition_penalty {sampling.repetition_penalty:g} the sampler "
        f"hides "
        "which tokens were left to draw from, so exp(old − sampled) isn't an importance ratio. Take top_k "
        "1 to "
        f"{MAX_KEPT} beside top_p and min_p, or top_p 1, top_k 0, min_p 0; repetition_penalty must be 1"
    )


def _covers_candidates_only(needs: str) -> str:
    """Why the sampler's log-probs, which cover the candidates that top_k left, can't be used by what `needs`
    all tokens."""
    return (
        "true takes the sampler's log-probs, which are over the tokens that top_k left, and the "
        f"{needs} those over the whole vocabulary; leave one of the two out, or set top_k 0, top_p 1, min_p 0"
    )


def _takes_candidates_only(config: AgenticConfig) -> bool:
    return config.train_sampling.keeps_ids and config.use_rollout_log_probs


ALGORITHM_RULES: tuple[Rule[AgenticConfig], ...] = (
    Rule(
        "reward_normalization",
        when=lambda c: c.estimator.normalization == "own" and c.departs("reward_normalization"),
        says=lambda c: f"{c.adv_estimator} centres scores in its own way; remove this section",
    ),
    Rule(
        "reward_normalization.method",
        when=lambda c: (
            c.estimator.needs_mean
            and c.estimator.normalization != "own"
            and c.reward_normalization.statistics.mean == "none"
        ),
        says=lambda c: (
            f"{c.reward_normalization.method} contradicts adv_estimator {c.adv_estimator}, "
            "which compares scores with their group's; use mean_std or mean (with grpo: Dr. "
            "GRPO), or adv_estimator reinforce for plain scores"
        ),
    ),
    Rule(
        "reward_normalization",
        when=lambda c: (
            c.reward_placement == "turn"
            and c.reward_normalization.changes_scores
            and c.estimator.reward_placement != "score"
            and c.estimator.normalization != "own"
            and not c.estimator.has_step_returns
        ),
        says=lambda c: (
            f"with reward_placement turn, {c.adv_estimator} works on single turn rewards, "
            "which can't be normalised; use method identity, or reward_placement final"
        ),
    ),
    Rule(
        "train_env_manager.generating_args",
        when=lambda c: c.train_sampling.is_greedy and c.train_env_manager.generating_args.is_greedy,
        says=lambda c: _GREEDY,
    ),
    Rule(
        "actor_infer.generating_args",
        when=lambda c: c.train_sampling.is_greedy and not c.train_env_manager.generating_args.is_greedy,
        says=lambda c: _GREEDY,
    ),
    Rule(
        "train_infer_correction",
        when=lambda c: c.train_sampling.loses_ids and c.train_infer_correction,
        says=lambda c: f"{_hides_candidates(c)}, or leave this out",
    ),
    Rule(
        "use_rollout_log_probs",
        when=lambda c: (
            c.use_rollout_log_probs and c.train_sampling.loses_ids and not c.train_infer_correction
        ),
        says=lambda c: f"{_hides_candidates(c)}, or leave this out",
    ),
    Rule(
        "use_rollout_log_probs",
        when=lambda c: _takes_candidates_only(c) and c.add_token_level_kl,
        says=lambda c: _covers_candidates_only("KL of add_token_level_kl needs"),
    ),
    Rule(
        "use_rollout_log_probs",
        when=lambda c: _takes_candidates_only(c) and c.pg_variant == "clip_cov",
        says=lambda c: _covers_candidates_only(f"covariances of {c.pg_variant} need"),
    ),
    Rule(
        "use_rollout_log_probs",
        when=lambda c: _takes_candidates_only(c) and c.pg_variant == "kl_cov",
        says=lambda c: _covers_candidates_only(f"covariances of {c.pg_variant} need"),
    ),
    Rule(
        "async_generation_ratio",
        when=lambda c: c.plays_ahead and c.train_sampling.loses_ids,
        says=lambda c: (
            f"{c.async_generation_ratio} trains on samples that are up to {c.staleness} old, "
            f"and {_hides_candidates(c)}, or train synchronously (async_generation_ratio: 0)"
        ),
    ),
    Rule(
        "group_filter",
        when=lambda c: c.group_filter == "non_zero_variance" and "greedy_sibling" in c.estimator.needs,
        says=lambda c: (
            "non_zero_variance drops groups whose siblings scored alike, and adv_estimator "
            f"{c.adv_estimator} learns from those too, by the score of a greedy sibling; leave "
            "one of them out"
        ),
    ),
    Rule(
        "whiten_rewards",
        when=lambda c: c.whiten_rewards and "greedy_sibling" in c.estimator.needs,
        says=lambda c: (
            f"moves the rewards that {c.adv_estimator} compares with the score of a greedy "
            "sibling; use whiten_advantages, or leave it out"
        ),
    ),
    Rule(
        "episode_reward_weight",
        when=lambda c: (
            c.estimator.mixes_step_advantages
            and not c.estimator.is_own
            and c.episode_reward_weight == 0
            and c.step_reward_weight == 0
        ),
        says=lambda c: "0, and step_reward_weight is 0 too: every advantage would be 0; set one of them",
    ),
    Rule(
        "add_token_level_kl",
        when=lambda c: c.add_token_level_kl and not c.init_kl_coef,
        says=lambda c: (
            "takes init_kl_coef × KL from the reward, and init_kl_coef is 0; set it (say 0.001), or leave "
            "this out"
        ),
    ),
    Rule(
        "kl_loss_type",
        when=lambda c: c.use_kl_loss and c.kl_loss_type == "k1",
        says=lambda c: "k1 can't be a loss: the expected gradient of k1 is zero; use k3 or k2",
    ),
    Rule(
        "kl_loss_type",
        when=lambda c: c.use_kl_loss and c.kl_loss_type == "abs",
        says=lambda c: "abs can't be a loss: abs estimates no KL; use k3 or k2",
    ),
    Rule(
        "train_infer_correction",
        when=lambda c: c.train_infer_correction and c.use_rollout_log_probs,
        says=lambda c: (
            "use_rollout_log_probs takes the sampler's log-probs as old ones, so every ratio is 1; remove "
            "one of the two"
        ),
    ),
)

SIBLING_RULES: tuple[Rule[AgenticConfig], ...] = (
    Rule(
        "group_filter",
        when=lambda c: c.group_filter == "non_zero_variance",
        says=lambda c: (
            "non_zero_variance keeps groups whose scores differ, and those of group_size 1 can't; leave "
            "it out"
        ),
    ),
)
