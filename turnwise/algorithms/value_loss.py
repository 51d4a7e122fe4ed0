"""The loss of a critic: the squared error of its values against the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.algorithms.aggregation import aggregate
from turnwise.algorithms.losses import loss_metrics
from turnwise.algorithms.masks import masked_mean, replace_outside
from turnwise.algorithms.ratios import Spans
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.protocols import Output
from turnwise.types import Batch, Metric, ModelOutputs


class ValueLoss:
    """½(V − R)², the mean over the states of decisions: before each trained token, or before each turn if `gae_granularity` is
    `turn`. A `protocols.Loss`.

    With `value_clip` c it is ½·max((V − R)², (clip(V, V_old − c, V_old + c) − R)²), V_old the value before the update: moving a
    value further than c doesn't reduce the loss (Schulman et al. 2016's GAE with PPO's clip; the pessimistic bound of OpenAI
    Baselines' ppo2).
    """

    outputs: frozenset[Output] = frozenset({"values"})

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.clip = settings.value_clip
        self.is_by_turn = settings.gae_granularity == "turn"

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """`(part of the step's loss, metrics)` from tensors [N]. Entries outside the trained states are never read."""
        mask = first_tokens(batch) if self.is_by_turn else batch.response_mask
        num_states = batch.denominators.num_turns if self.is_by_turn else batch.denominators.num_tokens
        values, old, returns = (replace_outside(x, mask) for x in (outputs.values.float(), batch.values, batch.returns))
        errors = (values - returns).square()
        losses = errors
        measured = {"critic/value": old, "critic/vpred": values, "critic/error": errors}
        if self.clip is not None:
            clipped = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            losses = torch.maximum(errors, clipped)
            measured["critic/clipfrac"] = clipped > errors
        share = replace_outside(batch.weights, mask)
        factors = share / num_states if num_states > 0 else torch.zeros_like(share)
        total = 0.5 * aggregate(losses, mask, factors)
        count = share.sum()
        means = [
            Metric(name, masked_mean(x.detach().float(), mask, batch.weights), weight=count) for name, x in measured.items()
        ]
        return total, [*loss_metrics({"critic/loss": total}, batch), *means]


def first_tokens(batch: Batch) -> Tensor:
    """bool [N]: the first trained token of each turn, marked once even if tokens in its middle aren't trained on."""
    trained = batch.response_mask.nonzero().squeeze(-1)
    turn = Spans.of(batch).turn_id[trained]
    is_first = torch.ones_like(trained, dtype=torch.bool)
    is_first[1:] = turn[1:] != turn[:-1]
    return torch.zeros_like(batch.response_mask).index_put((trained,), is_first)
