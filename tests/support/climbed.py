"""Runs whose policy unlearns."""

from __future__ import annotations

from typing import Any

from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.protocols import Loss
from turnwise.types import Batch, Metric, ModelOutputs


class Climbed:
    """A loss that is climbed instead of descended."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self.outputs = loss, loss.outputs

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
        value, metrics = self._loss(outputs, batch)
        return -value, metrics


def climb(pipeline: AgenticPipeline) -> None:
    """A change for `small_runs.run_small`."""
    pipeline.algorithm.loss = Climbed(pipeline.algorithm.loss)
