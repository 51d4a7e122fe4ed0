"""What `real_model.py` asks of its two contenders. No import of either: both interpreters read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RealJob:
    """GRPO on sums of one digit. An answer has `step_s` and `sampled`, the seconds and the sampled tokens of
    each step, and `scores`, its mean rewards."""

    model: str
    rows: str
    """A file of rows, which both train on in its order."""
    reward: str
    """The Python file that has the reward function `correct`."""
    threads: int = 2
    steps: int = 6
    groups: int = 8
    group_size: int = 8
    new_tokens: int = 24
    max_length: int = 96
    learning_rate: float = 1e-5
    seed: int = 0
    trl_micro_batch: int = 0
    """0 = the batch in one piece."""

    @property
    def batch(self) -> int:
        return self.groups * self.group_size
