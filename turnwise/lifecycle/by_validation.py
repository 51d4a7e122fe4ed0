"""Keeps the model with the best validation (`save_best`), and ends a run that no longer gets better
(`early_stopping`)."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.errors import ConfigError, counted, nearest
from turnwise.lifecycle.checkpoints import Checkpoints
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Metric

logger = logging.getLogger(__name__)

BEST_FILE = "best.json"
"""File beside the best model. It holds the model's step, and the name and value of the metric."""


@dataclass(slots=True)
class BestValue:
    """The best value of a metric so far.

    >>> best = BestValue("val/score/mean", "max", min_delta=0.1)
    >>> [best.see(step, {"val/score/mean": value}) for step, value in enumerate([0.5, 0.55, 0.7])]
    [True, False, True]
    >>> best.num_since
    0
    """

    metric: str
    mode: Literal["max", "min"]
    min_delta: float = 0.0
    value: float | None = None
    step: int = -1
    num_since: int = 0
    """Number of validations since the best one."""

    def see(self, step: int, measured: Mapping[str, float]) -> bool:
        """Records a validation. Returns whether it is better than the best so far by more than `min_delta`
        (NaN never is). Raises ConfigError if this validation and all earlier ones lack the metric."""
        if self.metric not in measured:
            if self.step < 0 and not self.num_since:
                raise ConfigError(
                    f"metric {self.metric!r} of save_best or early_stopping isn't measured by this run's "
                    "validations, which measure "
                    f"{', '.join(measured) or 'nothing'}.{nearest(self.metric, measured)}"
                )
            return False
        value = measured[self.metric]
        if math.isnan(value) or not self._gain(value) > self.min_delta:
            self.num_since += 1
            return False
        self.value = value
        self.step = step
        self.num_since = 0
        return True

    def _gain(self, value: float) -> float:
        """How much better a value is than the best so far."""
        if self.value is None:
            return math.inf
        if self.mode == "max":
            return value - self.value
        return self.value - value

    def record(self) -> dict[str, Any]:
        """The contents of `BEST_FILE`."""
        return {"step": self.step, "metric": self.metric, "value": self.value}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("metric", "mode", "value", "step", "num_since")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the saved values, unless they are of another metric or mode. Old states name neither, and
        are restored."""
        metric = state.get("metric", self.metric)
        mode = state.get("mode", self.mode)
        if metric != self.metric or mode != self.mode:
            return
        self.value = state["value"]
        self.step = state["step"]
        self.num_since = state["num_since"]


class ByValidation:
    """Applies `save_best` and `early_stopping` where the config sets them. The best model is written into
    `folder`."""

    def __init__(self, config: AgenticConfig | SFTConfig, folder: Path) -> None:
        self.best: BestValue | None = None
        self.stopping: BestValue | None = None
        self._patience = 0
        self._parts: dict[str, BestValue] = {}
        self._folder = folder
        best = config.save_best
        if best:
            self.best = BestValue(best.metric, best.mode)
            self._parts["best"] = self.best
        stopping = config.early_stopping
        if stopping:
            self.stopping = BestValue(stopping.metric, stopping.mode, stopping.min_delta)
            self._parts["stopping"] = self.stopping
            self._patience = stopping.patience

    def see(self, step: int, metrics: list[Metric], checkpoints: Checkpoints) -> list[Metric]:
        """Saves a better model; ends the run after `patience` validations without gain. Returns metrics and
        any `val/best`."""
        measured = reduce_metrics(metrics)
        if self.best and self.best.see(step, measured):
            checkpoints.save_model(self._folder, {BEST_FILE: json.dumps(self.best.record()) + "\n"})
            logger.info(
                "%s: the best so far, %s %g after %d steps",
                self._folder,
                self.best.metric,
                self.best.value,
                step,
            )
        stopping = self.stopping
        if stopping and not stopping.see(step, measured) and stopping.num_since >= self._patience:
            if step < checkpoints.num_steps:
                _warn_of_end(stopping, step, checkpoints.num_steps)
            checkpoints.end_here()
        if self.best is None or self.best.value is None:
            return metrics
        return [*metrics, Metric("val/best", self.best.value)]

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the best values. If the best model isn't in the folder, the next validation counts as the
        best so far."""
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(state[name])
        if self.best and self.best.value is not None and read_best(self._folder) != self.best.record():
            logger.warning(
                "the best model, of step %d, isn't in %s; the model of the next validation is saved there",
                self.best.step,
                self._folder,
            )
            self.best.value = None


def _warn_of_end(stopping: BestValue, step: int, num_steps: int) -> None:
    best = "never a number"
    if stopping.value is not None:
        best = f"best after {counted(stopping.step, 'step')} ({stopping.value:g})"
    end = f"{step} of {num_steps} steps"
    logger.warning("early_stopping: %s was %s: the run ends after %s", stopping.metric, best, end)


def read_best(folder: Path) -> dict[str, Any]:
    """Step, metric and value of the best model in the folder (`BEST_FILE`); empty if there is none."""
    try:
        record = json.loads((folder / BEST_FILE).read_text(encoding="utf-8"))
        return {name: record[name] for name in ("step", "metric", "value")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
