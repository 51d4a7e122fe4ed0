"""Estimators of KL(p ‖ q) from d = log p − log q of tokens sampled from p (Schulman, "Approximating KL
Divergence", 2020), and the KL to a reference as a penalty on rewards (Ziegler et al. 2019, arXiv:1909.08593,
eq. 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.spec import KLEstimator
from turnwise.types import FloatArray, Metric, Sample

MAX_EXPONENT = 20.0
"""Bound of log-prob differences before they are exponentiated: exp(20) ≈ 5e8 is finite in fp32."""


def k1(difference: Tensor) -> Tensor:
    """d: unbiased, may be negative. Its expected *gradient* is zero, so it is useless as a loss."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """½d²: biased, low variance; its expected gradient is that of KL(p ‖ q)."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(−d) + d − 1: unbiased, never negative."""
    bounded = difference.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp(-bounded) + bounded - 1.0


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": torch.abs,
    "k2": k2,
    "k3": k3,
}
"""The estimators by name. `abs`, |d|, is a distance and doesn't estimate the KL."""


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """The estimate of KL(p ‖ q) at each token [N] with d = `logprobs` (of p) − `base_logprobs` (of q).

    >>> lp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    >>> kl_divergence(lp, ref, "k3")
    tensor([0.0187, 0.1487, 0.0000])
    """
    return KL_ESTIMATORS[estimator](logprobs - base_logprobs)


@dataclass(slots=True)
class KLController:
    """Controls β (`coef`), the coefficient of the KL in the reward. With a `target`, each batch of n
    trajectories adapts it:

    e = clip(KL / target − 1, −0.2, 0.2); β ← β·(1 + e·min(n / horizon, 4)) (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2). The bound 4 isn't in the paper; it keeps β positive.

    >>> controller = KLController(0.2, target=6.0, horizon=10_000)
    >>> for kl, num_trajectories in ((12.0, 1000), (3.0, 1000), (6.3, 256)):
    ...     controller.update(kl, num_trajectories)
    ...     print(round(controller.coef, 10))
    0.204
    0.19992
    0.2001758976
    """

    coef: float
    target: float | None = None
    horizon: float = 10_000.0

    def update(self, kl: float, num_trajectories: int) -> None:
        """Adapts β. `kl` is in nats per token: the mean over the batch's trajectories of the mean over their
        tokens."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        share_of_horizon = min(num_trajectories / self.horizon, 4.0)
        self.coef *= 1.0 + error * share_of_horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a saved β if there is a `target`. A fixed β stays what the settings say."""
        if self.target is not None:
            self.coef = state["coef"]


def penalize_kl(
    tokens: ResponseTokens,
    settings: AlgorithmSettings,
    controller: KLController,
) -> tuple[Array, list[Metric]]:
    """β·KL_t(old ‖ ref) of each token [R], to be subtracted from the token's reward, and metrics. Without
    `add_token_level_kl` these penalties are 0, and without old or ref log-probs no KL is logged, not even as
    0. With `add_token_level_kl`, a `controller` with a target then adapts β, and missing log-probs raise
    ValueError."""
    old = tokens.gather([_full_logprobs(sample) for sample in tokens.samples])
    ref = tokens.gather([sample.ref_logprobs for sample in tokens.samples])
    if old is None or ref is None:
        if settings.add_token_level_kl:
            raise ValueError(
                "add_token_level_kl needs old_logprobs and ref_logprobs on every sample before credit"
            )
        return np.zeros(len(tokens.position)), []
    kl = kl_divergence(torch.from_numpy(old), torch.from_numpy(ref), settings.kl_penalty).numpy()
    if not len(kl):
        return kl, []
    sums = tokens.totals(kl)[tokens.is_trained]
    lengths = tokens.lengths[tokens.is_trained]
    kl_mean = float((sums / lengths).mean())
    metrics = [
        Metric("critic/kl", kl_mean, weight=len(sums)),
        Metric("critic/kl_sum", float(sums.mean()), weight=len(sums)),
    ]
    if not settings.add_token_level_kl:
        return np.zeros_like(kl), metrics
    metrics.append(Metric("critic/kl_coef", controller.coef, "last"))
    penalties = controller.coef * kl
    controller.update(kl_mean, len(tokens.trajectories))
    return penalties, metrics


def _full_logprobs(sample: Sample) -> FloatArray | None:
    """The old log-probs over the whole vocabulary; those over kept ids are beside them where both exist."""
    if sample.old_full_logprobs is not None:
        return sample.old_full_logprobs
    return sample.old_logprobs
