"""The coefficient β of the KL penalty in the reward, fixed or steered to a target."""

from __future__ import annotations

from typing import Protocol

from turnwise.protocols import Stateful


class KLController(Stateful, Protocol):
    """Holds β. `update` gets the KL of each batch; the state is part of the checkpoint."""

    coef: float

    def update(self, kl: float, num_trajectories: int) -> None:
        """`kl` in nats per token: the mean over the batch's trajectories of the mean over their tokens."""
        ...


class FixedKLController:
    """β never changes."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_trajectories: int) -> None:
        return None

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keeps β as the settings have it, whatever it was before."""


class AdaptiveKLController:
    """e = clip(KL / target − 1, −0.2, 0.2); β ← β·(1 + e·n / horizon) (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    >>> controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
    >>> for kl, num_trajectories in ((12.0, 1000), (3.0, 1000), (6.3, 256)):
    ...     controller.update(kl, num_trajectories)
    ...     print(round(controller.coef, 10))
    0.204
    0.19992
    0.2001758976
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_trajectories: int) -> None:
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_trajectories / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


def make_kl_controller(init_kl_coef: float, target_kl: float | None, kl_horizon: float) -> KLController:
    """Adaptive if there is a target, else fixed."""
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, target_kl, kl_horizon)
