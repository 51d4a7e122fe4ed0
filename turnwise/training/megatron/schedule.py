"""Runs micro-batches through the pipeline stages in Megatron's order."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from turnwise.protocols import Output
from turnwise.types import Batch

Compute = Callable[[Any, Any], Any]
"""What a part of the model computes of a micro-batch: hidden states, or tensors by name on the last stage."""
Judge = Callable[[Any, dict[str, Tensor]], tuple[Tensor, Any]]
"""The loss of a micro-batch's outputs, and what the caller gets back."""


def run_pipeline(
    parts: Sequence[Any],
    batches: Sequence[Batch],
    outputs: frozenset[Output],
    judge: Judge,
    is_forward_only: bool = False,
) -> list[Any]:
    """`run_schedule` for the outputs of each batch."""

    def compute(part: Any, batch: Batch) -> Any:
        return part(batch, outputs)

    return run_schedule(parts, batches, compute, judge, is_forward_only)


def run_schedule(
    parts: Sequence[Any],
    batches: Sequence[Any],
    compute: Compute,
    judge: Judge,
    is_forward_only: bool = False,
) -> list[Any]:
    """What `judge` gives back for each batch of tensors, on the last stage; nothing on others. Gradients of
    the losses are added to the parameters' buffers, unless it runs forward only.

    With `calculate_per_token_loss`, Megatron neither divides the losses by the number of micro-batches nor
    averages them over ranks."""
    schedule = get_forward_backward_func()
    iterators = [iter(batches) for _ in parts]
    results: list[Any] = schedule(
        forward_step_func=partial(_step, compute=compute, judge=judge),
        data_iterator=iterators if len(parts) > 1 else iterators[0],
        model=list(parts),
        num_microbatches=len(batches),
        seq_length=1,  # stages tell each other the real shapes
        micro_batch_size=1,
        forward_only=is_forward_only,
    )
    return results


def _step(
    batches: Iterator[Any],
    part: Any,
    compute: Compute,
    judge: Judge,
) -> tuple[Any, Callable[[dict[str, Tensor]], tuple[Tensor, Tensor, Any]]]:
    batch = next(batches)

    def judged(computed: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any]:
        loss, answer = judge(batch, computed)
        return loss, torch.zeros((), dtype=torch.int), answer

    return compute(part, batch), judged
