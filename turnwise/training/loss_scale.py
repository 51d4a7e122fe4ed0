"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2)."""

from __future__ import annotations

_FIRST = 2.0**16
_GROWTH_STEPS = 2000  # steps without an overflow after which the scale doubles


class LossScale:
    """The factor of the loss, so that small gradients don't underflow. 1 unless `is_on`.

    A step whose gradient overflows is skipped and halves the factor.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.factor = _FIRST if is_on else 1.0
        self._num_good = 0

    @property
    def is_lowest(self) -> bool:
        """Whether a smaller factor couldn't help: the gradient isn't finite by itself."""
        return self.factor <= 1.0

    def update(self, is_skipped: bool) -> None:
        """Adapts the factor after an optimiser step."""
        if not self.is_on:
            return
        self._num_good = 0 if is_skipped else self._num_good + 1
        if is_skipped:
            self.factor = max(1.0, self.factor / 2)
        elif self._num_good == _GROWTH_STEPS:
            self.factor, self._num_good = self.factor * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues with a saved factor; that of a run in another dtype is left aside."""
        if self.is_on and state:
            self.factor, self._num_good = state["factor"], int(state["num_good"])
