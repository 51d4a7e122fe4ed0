"""AdamW, its learning-rate schedule, and the loss scale of fp16."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW
from transformers import get_scheduler

from turnwise.errors import ConfigError, nearest

_SCHEDULES = {
    **dict.fromkeys(("constant", "constant_with_warmup", "inverse_sqrt"), False),
    **dict.fromkeys(("linear", "cosine", "cosine_with_restarts", "polynomial"), True),
}
"""Names of transformers' schedules, and whether each needs `total_steps`."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) and one of transformers' schedules. Steps are counted in planned
    optimiser steps (see `LRSchedule`). `warmup_steps` (0 = unset) takes precedence over `warmup_ratio`, a
    share of `total_steps`. Raises ConfigError if the schedule is unknown, or if the schedule or
    `warmup_ratio` needs `total_steps` and it is None."""

    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    scheduler: str = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.scheduler not in _SCHEDULES:
            raise ConfigError(
                f"lr_scheduler_type {self.scheduler!r} is unknown; allowed are {', '.join(_SCHEDULES)}."
                f"{nearest(self.scheduler, _SCHEDULES)}"
            )
        if self.total_steps is None and (_SCHEDULES[self.scheduler] or self.warmup_ratio):
            raise ConfigError(
                f"lr_scheduler_type {self.scheduler} with warmup_ratio {self.warmup_ratio} needs the number "
                "of optimiser steps; set max_steps, or use constant with warmup_steps"
            )

    @property
    def num_warmup_steps(self) -> int:
        return self.warmup_steps or round(self.warmup_ratio * (self.total_steps or 0))

    def describe(self) -> str:
        """The optimiser and its schedule on one line.

        >>> OptimizerSettings(1e-3, scheduler="linear", warmup_steps=5, total_steps=80).describe()
        'AdamW at 0.001, linear, warm-up 5 of 80 optimiser steps, weight decay 0, betas 0.9 and 0.999'
        """
        steps = f"{self.num_warmup_steps} of {self.total_steps or 'any number of'} optimiser steps"
        return (
            f"AdamW at {self.learning_rate:g}, {self.scheduler}, warm-up {steps}, weight decay "
            f"{self.weight_decay:g}, betas {self.betas[0]:g} and {self.betas[1]:g}"
        )


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> AdamW:
    """AdamW for the trainable parameters. Norms and biases (tensors of one dimension) have no weight
    decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": settings.weight_decay})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def moment_numbers(shapes: Iterable[tuple[str, torch.Size]]) -> Mapping[str, int]:
    """The number that plain AdamW gives each trained tensor of a Hugging Face model (`build_optimizer`):
    first those of several dimensions, then the others.

    >>> moment_numbers([("norm", torch.Size([2])), ("embedding", torch.Size([3, 2]))])
    {'embedding': 0, 'norm': 1}
    """
    named = list(shapes)
    matrices = [name for name, shape in named if len(shape) >= 2]
    vectors = [name for name, shape in named if len(shape) < 2]
    return {name: number for number, name in enumerate([*matrices, *vectors])}


class LRSchedule:
    """The learning rate as a function of the position in the run, which is the number of planned optimiser
    steps so far.

    A position may be fractional: if a batch has more samples than planned, each of its optimiser steps counts
    as a fraction of a planned step. Unlike in transformers, the schedule `constant` has warm-up steps too.

    >>> schedule = LRSchedule(OptimizerSettings(1.0, scheduler="linear", total_steps=4))
    >>> [schedule.rate(position) for position in (0, 1, 1.5, 4, 5)]
    [1.0, 0.75, 0.625, 0.0, 0.0]
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        name = settings.scheduler
        if name == "constant" and settings.num_warmup_steps > 0:
            name = "constant_with_warmup"
        scheduler = get_scheduler(
            name,
            # transformers makes a schedule only for an optimiser.
            SGD([nn.Parameter(torch.zeros(1))], lr=settings.learning_rate),
            num_warmup_steps=settings.num_warmup_steps,
            num_training_steps=settings.total_steps,
        )
        self._peak = settings.learning_rate
        self._factor: Callable[[float], float] = scheduler.lr_lambdas[0]

    def rate(self, position: float) -> float:
        """The learning rate of the optimiser step that begins at `position`."""
        return self._peak * self._factor(position)


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scales all gradients down if their joint 2-norm exceeds `max_norm` (None = never); returns the norm
    before scaling."""
    limit = float("inf") if max_norm is None else max_norm
    return nn.utils.clip_grad_norm_(list(parameters), limit, foreach=True)


_FIRST_FACTOR = 2.0**16
_GROWTH_STEPS = 2000  # steps without an overflow after which the factor doubles


class LossScale:
    """A factor that multiplies the loss, so that small gradients don't underflow in fp16; 1 unless `is_on`.
    An optimiser step whose gradient overflows is skipped, and halves the factor."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.factor = _FIRST_FACTOR if is_on else 1.0
        self._num_good = 0

    @property
    def is_lowest(self) -> bool:
        """Whether the factor is 1, its minimum. If so, loss scaling isn't the reason why a gradient isn't
        finite."""
        return self.factor <= 1.0

    def update(self, is_skipped: bool) -> None:
        """Adapts the factor after an optimiser step."""
        if not self.is_on:
            return
        if is_skipped:
            self.factor = max(1.0, self.factor / 2)
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == _GROWTH_STEPS:
            self.factor *= 2
            self._num_good = 0

    def state_dict(self) -> dict[str, float]:
        if not self.is_on:
            return {}
        return {"factor": self.factor, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues with a saved factor if this run scales its loss and the saved state isn't empty."""
        if self.is_on and state:
            self.factor = state["factor"]
            self._num_good = int(state["num_good"])
