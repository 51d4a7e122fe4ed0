"""GRPO's credit and loss alone, without model, engine or pipeline, must learn a bandit, and must not with the wrong sign."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.score_estimator import GRPO
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.types import Batch, Denominators, Group, ModelOutputs, Sample, Task, Trajectory, Turn, TurnSpan, samples_of

ARM_REWARDS = torch.tensor([0.1, 0.9, 0.3, 0.2])
NUM_GROUPS, GROUP_SIZE, NUM_STEPS = 4, 8, 40


def play(logits: torch.Tensor, generator: torch.Generator) -> list[Group]:
    """Groups of episodes of one prompt token and one sampled token, the arm; rewards are 0 or 1."""
    task = Task(id="bandit", tag="bandit", split="train", seed=0)
    logprobs = torch.log_softmax(logits.detach(), 0)
    groups = []
    for _ in range(NUM_GROUPS):
        arms = torch.multinomial(logprobs.exp(), GROUP_SIZE, replacement=True, generator=generator)
        rewards = torch.bernoulli(ARM_REWARDS[arms], generator=generator)
        trajectories = []
        for sibling, (arm, reward) in enumerate(zip(arms.tolist(), rewards.tolist(), strict=True)):
            sampled = np.array([logprobs[arm].item()], dtype=np.float32)
            turn = Turn(np.array([0]), np.array([arm]), sampled, reward=reward)
            mask = np.array([False, True])
            sample = Sample(np.array([0, arm]), mask, np.where(mask, sampled, 0.0).astype(np.float32), (TurnSpan(0, 1, 2),))
            trajectories.append(Trajectory(task, sibling, turns=[turn], samples=[sample]))
        groups.append(Group(task, trajectories))
    return groups


def packed(samples: list[Sample]) -> Batch:
    count = len(samples)
    mask = torch.from_numpy(np.concatenate([s.response_mask for s in samples]))
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in samples])),
        position_ids=torch.arange(2).repeat(count),
        sequence_id=torch.arange(count).repeat_interleave(2),
        turn_id=torch.where(mask, 0, -1),
        response_mask=mask,
        weights=torch.ones(2 * count),
        lengths=(2,) * count,
        denominators=Denominators(float(mask.sum()), float(count), 2),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in samples])),
    )


def train(settings: AlgorithmSettings, seed: int, sign: float = 1.0) -> float:
    """Probability of the best arm after training; it starts at 0.25."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(len(ARM_REWARDS), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.15)
    algorithm = GRPO(settings)
    for _ in range(NUM_STEPS):
        groups = play(logits, generator)
        algorithm.credit(groups)
        for sample in samples_of(groups):
            sample.advantages = sign * sample.advantages
        batch = packed(samples_of(groups))
        logprobs = torch.log_softmax(logits, 0)[batch.token_ids]
        loss, _ = algorithm.loss(ModelOutputs(logprobs=logprobs), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.softmax(logits, 0)[ARM_REWARDS.argmax()].item()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_the_best_arm_is_learnt(mode):
    settings = AlgorithmSettings(loss_agg_mode=mode)
    assert [train(settings, seed) > 0.85 for seed in range(3)] == [True] * 3


def test_with_the_sign_flipped_it_is_unlearnt():
    assert [train(AlgorithmSettings(), seed, sign=-1.0) < 0.05 for seed in range(3)] == [True] * 3


def test_without_a_signal_nothing_is_learnt():
    assert train(AlgorithmSettings(), seed=0, sign=0.0) == pytest.approx(0.25)
