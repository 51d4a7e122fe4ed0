"""Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.algorithms.advantages import credit_scores
from turnwise.algorithms.controllers import KLController, make_kl_controller
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.normalization import resolve_normalizer
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.errors import ConfigError
from turnwise.protocols import Loss, Stateful
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric


class GRPO:
    """A_t = (s − μ) / (σ + 1e-6) over the siblings of a task, on every trained token; then the clipped loss.

    `method: mean` with `loss_agg_mode: seq-mean-token-sum-norm` is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    `loss` is a `protocols.Loss` of its own, which can be sent to the ranks of a strategy without this object. `running` holds
    the statistics of all scores so far where `reward_normalization` uses them, else it is None.

    Raises:
        ConfigError: settings that contradict GRPO or each other.
        NotAvailableError: a valid setting that isn't in this version.
    """

    needs: frozenset[str]
    loss: Loss
    value_loss: Loss | None = None
    running: Stateful | None

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        self.normalizer = resolve_normalizer(settings.reward_normalization, ESTIMATORS["grpo"].normalization)
        if self.normalizer.mean_type == "none":
            raise ConfigError(
                f"adv_estimator grpo compares siblings with their mean, and reward_normalization (method "
                f"{self.normalizer.method!r}) takes none. Use method mean_std or mean, or adv_estimator reinforce."
            )
        self.running = self.normalizer.running
        self.settings = settings
        self.controller = kl_controller or make_kl_controller(settings.init_kl_coef, settings.target_kl, settings.kl_horizon)
        self.loss = PolicyLoss(settings)
        self.needs = settings.needs

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages` into every sample of the groups; failed trajectories are not among them."""
        return credit_scores(groups, self.settings, self.controller, self.normalizer, self.normalizer.grouping)
