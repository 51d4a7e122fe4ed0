"""The common base of the algorithms."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from turnwise.algorithms.kl import KLController, penalize_kl
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.normalization import resolve_normalizer
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.errors import ConfigError
from turnwise.protocols import Loss, Stateful
from turnwise.spec import EstimatorSpec
from turnwise.types import Group, Metric


class Estimator(ABC):
    """A `protocols.Algorithm` with the policy's loss, the KL in the reward and the normalisation; a subclass
    defines `credit`.

    `running` holds the statistics since training began if `reward_normalization` uses them, else None. Raises
    ConfigError if the settings contradict the estimator: for example, a normalisation without a mean for
    GRPO."""

    spec: ClassVar[EstimatorSpec] = EstimatorSpec()
    """The estimator's defaults and needs; those of a built-in estimator are in `turnwise.spec.ESTIMATORS`."""
    needs: frozenset[str]
    loss: Loss
    value_loss: Loss | None = None
    running: Stateful | None

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        whitens = settings.whiten_advantages or self.spec.whitens_advantages
        self.settings = replace(settings, whiten_advantages=whitens)
        self.normalizer = resolve_normalizer(settings.reward_normalization, self.spec.normalization)
        if self.spec.needs_mean and self.normalizer.mean_type == "none":
            raise ConfigError(
                f"adv_estimator {settings.adv_estimator} compares siblings with their mean, but "
                f"reward_normalization.method {self.normalizer.method!r} subtracts no mean. Use method "
                "mean_std or mean, or adv_estimator reinforce."
            )
        self.running = self.normalizer.running
        self.controller = kl_controller or KLController(
            settings.init_kl_coef,
            settings.target_kl,
            settings.kl_horizon,
        )
        self.loss = PolicyLoss(settings)
        self.needs = settings.needs | self.spec.needs

    @abstractmethod
    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages` into every sample of the groups, and returns metrics. Callers pass no failed
        trajectories."""

    def penalize(self, tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        """β·KL of each token [R] (0 without a KL in the reward), and metrics. Each trajectory's sum becomes
        its `score_kl_penalty`."""
        penalties, metrics = penalize_kl(tokens, self.settings, self.controller)
        totals = tokens.totals(penalties).tolist()
        for trajectory, penalty in zip(tokens.trajectories, totals, strict=True):
            trajectory.score_kl_penalty = penalty
        return penalties, metrics


def tokens_of(groups: Sequence[Group]) -> ResponseTokens:
    """The trained tokens of all trajectories of the groups."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return ResponseTokens.of(trajectories)
