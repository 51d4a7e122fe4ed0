"""Builders of nested data and batches by hand, so that no other room is needed to test the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from turnwise.types import Batch, Denominators, Group, Sample, Task, Trajectory, Turn, TurnSpan


def build_sample(mask: Sequence[int], weight: float = 1.0) -> Sample:
    mask_array = np.array(mask, dtype=bool)
    positions = np.flatnonzero(mask_array)
    spans = (TurnSpan(0, int(positions[0]), int(positions[-1]) + 1),) if len(positions) else ()
    return Sample(
        token_ids=np.arange(len(mask)),
        response_mask=mask_array,
        rollout_logprobs=np.zeros(len(mask), dtype=np.float32),
        turn_spans=spans,
        weight=weight,
    )


def build_group(
    scores: Sequence[float],
    masks: Sequence[Sequence[Sequence[int]]] | None = None,
    tag: str = "FrozenLake",
    weights: Sequence[float] | None = None,
    task_id: str = "train/FrozenLake/0",
) -> Group:
    """A group with one trajectory a score; `masks[i]` are the response masks of the samples of trajectory i."""
    task = Task(id=task_id, tag=tag, split="train", seed=0)
    masks = masks or [[[0, 1, 1]] for _ in scores]
    weights = weights or [1.0] * len(scores)
    trajectories = []
    for sibling, (score, sample_masks, weight) in enumerate(zip(scores, masks, weights, strict=True)):
        turn = Turn(np.array([0]), np.array([1, 2]), np.zeros(2, np.float32), reward=score)
        samples = [build_sample(mask, weight) for mask in sample_masks]
        trajectories.append(Trajectory(task, sibling, turns=[turn], samples=samples, weight=weight))
    return Group(task, trajectories)


def build_batch(masks: Sequence[Sequence[int]], weights: Sequence[float] | None = None, max_length: int = 4, **arrays) -> Batch:
    """Tensors [N] of the given sequences; `arrays` are flat lists or tensors. The batch is its own optimiser step."""
    weights = weights or [1.0] * len(masks)
    lengths = tuple(len(mask) for mask in masks)
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    per_token = torch.tensor([w for w, n in zip(weights, lengths, strict=True) for _ in range(n)])
    denominators = Denominators(
        num_tokens=float((per_token * mask).sum()),
        num_sequences=sum(w for w, row in zip(weights, masks, strict=True) if any(row)),
        max_length=max_length,
    )
    return Batch(
        token_ids=torch.zeros(len(mask), dtype=torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        sequence_id=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]),
        turn_id=torch.where(mask, 0, -1),
        response_mask=mask,
        weights=per_token,
        lengths=lengths,
        denominators=denominators,
        **{name: torch.as_tensor(array, dtype=torch.float32) for name, array in arrays.items()},
    )


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return build_sample


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return build_group


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return build_batch
