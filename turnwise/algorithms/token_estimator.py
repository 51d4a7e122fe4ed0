"""Credit on token rewards: returns of the response tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from turnwise.algorithms.advantages import clip, summary, whiten_all, write_advantages
from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.estimator import Estimator, scores_of, tokens_of, weights_of
from turnwise.algorithms.normalization import group_ids
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.reward_placement import Placement, final_rewards, place_rewards
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.errors import ConfigError
from turnwise.types import Group, Metric


class TokenEstimator(Estimator):
    """Base of the estimators on token rewards; a subclass turns rewards into advantages.

    Rewards, in this order: r_k on the last token of turn k, or s on the last of all (`reward_placement: final`); minus β·KL of
    each token; clipped to ±`reward_clip`; whitened. If s is normalised, β·ΣKL is subtracted from s first.
    """

    normalizes: ClassVar[Literal["scores", "step returns"]] = "scores"
    """The values that `reward_normalization` normalises. Rewards of single turns are never normalised."""
    placement: Placement

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        default: Placement = "final" if self.spec.placement == "final" else "turn"
        self.placement = settings.reward_placement or default
        if self.normalizes == "scores" and self.placement == "turn" and not self.normalizer.is_identity:
            raise ConfigError(
                f"with reward_placement turn, adv_estimator {settings.adv_estimator} works on single turn rewards, which can't "
                "be normalised; use reward_normalization.method identity, or reward_placement final"
            )

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages`, and with a critic `returns`, into every sample of the groups.

        Raises:
            ValueError: a forward pass that credit needs hasn't run.
        """
        tokens = tokens_of(groups)
        rewards, metrics = self.token_rewards(groups, tokens)
        rewards = whiten_all(rewards) if self.settings.whiten_rewards else rewards
        advantages, measured = self.estimate(groups, tokens, rewards)
        metrics += [*summary("critic/score", scores_of(groups)), *measured]
        return metrics + write_advantages(tokens, advantages, self.settings)

    def token_rewards(self, groups: Sequence[Group], tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        """The reward of each token [R], clipped but not yet whitened."""
        penalties, metrics = self.penalize(tokens)
        if self.normalizer.is_identity:
            rewards = place_rewards(tokens, self.placement) - penalties
        else:
            scores, ids = scores_of(groups) - tokens.totals(penalties), group_ids(groups, self.normalizer.grouping)
            rewards = final_rewards(tokens, self.normalizer(scores, ids, weights_of(groups)))
        rewards, clipped = clip("critic/token_reward_clip_frac", rewards, self.settings.reward_clip)
        return rewards, [*metrics, *clipped, *summary("critic/rewards", tokens.totals(rewards)[tokens.is_trained])]

    @abstractmethod
    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """The advantages [R] from the tokens' `rewards` [R], and metrics."""
