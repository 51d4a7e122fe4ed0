"""Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300, section 4.1)."""

from __future__ import annotations

from turnwise.algorithms.score_estimator import ScoreEstimator
from turnwise.spec import ESTIMATORS


class GRPO(ScoreEstimator):
    """A = (s − μ) / (σ + 1e-6) over the siblings of a task, on every trained token; then the clipped loss.

    `method: mean` with `loss_agg_mode: seq-mean-token-sum-norm` is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).

    Raises:
        ConfigError: a `reward_normalization` that takes no mean.
    """

    spec = ESTIMATORS["grpo"]
