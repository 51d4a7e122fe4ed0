"""The coefficient β of the KL penalty in the reward, fixed or steered to a target."""

from __future__ import annotations


class KLController:
    """Holds β, which is part of the checkpoint. Without a `target` it never changes; with one, each batch steers it:

    e = clip(KL / target − 1, −0.2, 0.2); β ← β·(1 + e·n / horizon) (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    >>> controller = KLController(0.2, target=6.0, horizon=10_000)
    >>> for kl, num_trajectories in ((12.0, 1000), (3.0, 1000), (6.3, 256)):
    ...     controller.update(kl, num_trajectories)
    ...     print(round(controller.coef, 10))
    0.204
    0.19992
    0.2001758976
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = 10_000.0) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_trajectories: int) -> None:
        """`kl` in nats per token: the mean over the batch's trajectories of the mean over their tokens."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * num_trajectories / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on with a steered β; a fixed one stays as the settings have it, whatever it was before."""
        if self.target is not None:
            self.coef = state["coef"]
