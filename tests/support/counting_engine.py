"""Runs of the embedded engine whose forward passes are remembered."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from turnwise.inference.embedded.engine import Engine
from turnwise.inference.embedded.fused_runner import FusedRunner
from turnwise.inference.embedded.runner import PackedStep
from turnwise.inference.request import Finished


class CountingRunner(FusedRunner):
    """Remembers its steps, and breaks when told to."""

    def __init__(self, model: PreTrainedModel, **sizes: int) -> None:
        super().__init__(model, **sizes)
        self.steps: list[PackedStep] = []
        self.is_broken = False

    @property
    def counts(self) -> list[list[int]]:
        """For each step, the number of new tokens of each row."""
        return [step.counts.tolist() for step in self.steps]

    def forward(self, step: PackedStep) -> Tensor:
        if self.is_broken:
            raise RuntimeError("out of memory")
        self.steps.append(step)
        return super().forward(step)


def run(engine: Engine) -> dict[str, Finished]:
    """Steps until no request is left. Returns what became of each, by its conversation."""
    finished = {}
    while engine.has_work:
        finished.update({item.request.request_id: item for item in engine.step()})
    return finished
