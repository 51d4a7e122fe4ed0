"""The loss of supervised fine-tuning."""

from typing import Any

import torch

from turnwise.protocols import Output
from turnwise.types import Batch, Metric, ModelOutputs


class CrossEntropy:
    """−Σ weight · log p of the trained tokens, divided by Σ weight of all trained tokens of the optimiser
    step."""

    outputs: frozenset[Output] = frozenset({"logprobs"})

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
        weights = torch.where(batch.response_mask, batch.weights, torch.zeros_like(batch.weights))
        total = -(weights * outputs.logprobs).sum()
        loss = total / max(batch.denominators.num_tokens, 1e-8)
        metrics = [
            Metric("loss", loss.detach(), "sum"),
            Metric("tokens", weights.sum().detach(), "sum"),
        ]
        return loss, metrics
