"""Builders of nested data and batches by hand, so that no other room is needed to test the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from turnwise.batching.samples import build_samples
from turnwise.types import Batch, Denominators, Group, Sample, Task, Trajectory, Turn, TurnSpan

NAN = np.float32("nan")


def build_sample(mask: Sequence[int]) -> Sample:
    mask_array = np.array(mask, dtype=bool)
    positions = np.flatnonzero(mask_array)
    spans = (TurnSpan(0, int(positions[0]), int(positions[-1]) + 1),) if len(positions) else ()
    return Sample(np.arange(len(mask)), mask_array, np.zeros(len(mask), dtype=np.float32), spans)


def build_group(scores: Sequence[float], masks: Sequence[Sequence[Sequence[int]]] | None = None) -> Group:
    """A group with one trajectory a score; `masks[i]` are the response masks of the samples of trajectory
    i."""
    task = Task(id="train/FrozenLake/0", tag="FrozenLake", split="train", seed=0)
    trajectories = []
    for sibling, (score, sample_masks) in enumerate(
        zip(scores, masks or [[[0, 1, 1]]] * len(scores), strict=True)
    ):
        turn = Turn(np.array([0]), np.array([1, 2]), np.zeros(2, np.float32), reward=score)
        trajectories.append(
            Trajectory(task, sibling, turns=[turn], samples=[build_sample(mask) for mask in sample_masks])
        )
    return Group(task, trajectories)


def build_batch(
    masks: Sequence[Sequence[int]], weights: Sequence[float] | None = None, max_length: int = 4, **arrays
) -> Batch:
    """Tensors [N] of the given sequences; `arrays` are flat lists or tensors. The batch is its own optimiser
    step."""
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


def random_turn(rng: np.random.Generator, index: int) -> Turn:
    """Mostly trained; sometimes greedy, empty, in a fresh context, or continuing an earlier turn than the one
    before it."""
    num_response = int(rng.integers(0, 4))
    return Turn(
        prompt_ids=np.arange(rng.integers(1, 4)),
        response_ids=np.arange(num_response),
        logprobs=np.full(num_response, -0.5, np.float32),
        observation=str(rng.integers(2)),
        reward=float(rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])),
        state_key=("room", int(rng.integers(3))),
        is_greedy=bool(rng.random() < 0.1),
        starts_context=bool(rng.random() < 0.2),
        parent=int(rng.integers(index)) if index and rng.random() < 0.2 else None,
    )


def random_trajectory(rng: np.random.Generator, task: Task, sibling: int, weight: float = 1.0) -> Trajectory:
    """With its samples, some tokens of which are masked. What forward passes would fill is NaN outside the
    mask."""
    turns = [random_turn(rng, index) for index in range(rng.integers(1, 6))]
    outcomes = {"judge": 0.5} if rng.random() < 0.3 else {}
    is_cut = rng.random() < 0.3
    trajectory = Trajectory(task, sibling, turns=turns, outcome_rewards=outcomes, weight=weight)
    trajectory.status, trajectory.limit = ("truncated", "environment") if is_cut else ("finished", None)
    trajectory.samples = build_samples(trajectory)
    for sample in trajectory.samples:
        sample.response_mask &= rng.random(sample.num_tokens) > 0.1
        for name in ("values", "next_values", "old_logprobs", "ref_logprobs"):
            array = rng.normal(size=sample.num_tokens).astype(np.float32)
            setattr(sample, name, np.where(sample.response_mask, array, NAN))
    return trajectory


def build_nested(seed: int, smallest: int = 1) -> list[Group]:
    """Groups of several sizes and two tags, two of them of one task id; runs of one trajectory, or of two of
    weight ½."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(rng.integers(2, 5)):
        tag = str(rng.choice(["lake", "boxes"]))
        task = Task(id=f"train/{tag}/{index // 2}", tag=tag, split="train", seed=0)
        trajectories = []
        for sibling in range(rng.integers(smallest, 5)):
            weights = [0.5, 0.5] if rng.random() < 0.25 else [1.0]
            trajectories += [random_trajectory(rng, task, sibling, weight) for weight in weights]
        groups.append(Group(task, trajectories, index=index, greedy=random_trajectory(rng, task, 0)))
    return groups


@pytest.fixture
def make_nested() -> Callable[..., list[Group]]:
    return build_nested


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return build_group


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    return build_batch
