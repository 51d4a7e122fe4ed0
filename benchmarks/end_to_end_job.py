"""What `end_to_end.py` asks of its two contenders. No import of either: both interpreters read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A GRPO run over FrozenLake. An answer has `step_s`, `rollout_s` and `tokens` (`total` and `sampled`) of
    each step, and `curve`: seconds of training and held-out success, every `eval_every` steps until
    `target`."""

    model: str
    threads: int = 2
    steps: int = 8
    groups: int = 8
    group_size: int = 8
    max_turns: int = 8
    max_length: int = 512
    learning_rate: float = 3e-4
    adam_beta2: float = 0.95
    warmup_steps: int = 5
    seed: int = 0
    eval_every: int = 0
    eval_episodes: int = 256
    target: float = 2.0
    trl_micro_batch: int = 0
    """0 = the batch in one piece."""

    @property
    def batch(self) -> int:
        return self.groups * self.group_size
