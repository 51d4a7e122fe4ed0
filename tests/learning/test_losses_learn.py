"""Every `pg_variant`, ratio and correction learns a bandit of two turns from random weights, and unlearns it
with the wrong sign. The policy is a table; batches are packed, prepared and cut as in training, and two
passes make ratios leave 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight, RatioBand
from turnwise.batching.pack import pack, unpack
from turnwise.batching.plan import denominators
from turnwise.spec import PG_VARIANTS
from turnwise.types import ModelOutputs, Sample, TurnSpan

ARM_REWARDS = np.array([[0.1, 0.9, 0.3, 0.2], [0.8, 0.1, 0.2, 0.3]])
"""Rewards of each turn's arms; the best pair is (1, 0)."""
NUM_GROUPS, GROUP_SIZE, NUM_ROUNDS, NUM_EPOCHS = 4, 8, 30, 2
MASK = np.array([False, True, False, True])
DRIFT = 0.3
"""How far the sampler's logits are from the trainer's, where a correction is tried."""


def play(logits: torch.Tensor, rng: np.random.Generator, drift: float) -> list[Sample]:
    """Groups of siblings; each token sequence is prompt, arm, prompt, arm. Advantages are centred on the
    group."""
    old = torch.log_softmax(logits.detach(), 1).numpy()
    sampler = torch.log_softmax(logits.detach() + drift * torch.tensor([1.0, -1.0, 1.0, -1.0]), 1).numpy()
    samples = []
    for _ in range(NUM_GROUPS):
        arms = np.stack(
            [rng.choice(4, GROUP_SIZE, p=np.exp(row) / np.exp(row).sum()) for row in sampler], axis=1
        )
        scores = (rng.random((GROUP_SIZE, 2)) < ARM_REWARDS[[0, 1], arms]).sum(axis=1).astype(np.float32)
        for pair, advantage in zip(arms, (scores - scores.mean()) / (scores.std() + 1e-6), strict=True):
            known = {"rollout_logprobs": sampler, "old_logprobs": old}
            arrays = {
                name: np.array([0, table[0, pair[0]], 0, table[1, pair[1]]], np.float32)
                for name, table in known.items()
            }
            arrays["advantages"] = np.where(MASK, advantage, 0).astype(np.float32)
            spans = (TurnSpan(0, 1, 2), TurnSpan(1, 3, 4))
            samples.append(Sample(np.array([0, pair[0], 0, pair[1]]), MASK, turn_spans=spans, **arrays))
    return samples


def train(settings: AlgorithmSettings, seed: int = 0, sign: float = 1.0, drift: float = 0.0) -> float:
    """Probability of the best pair after training; it starts near 1/16."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=0.1, size=(2, 4)).astype(np.float32)).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    loss = PolicyLoss(settings)
    for number in range(NUM_ROUNDS):
        samples = play(logits, rng, drift)
        for sample in samples:
            sample.advantages = np.float32(sign) * sample.advantages
        batch = pack(samples, denominators(samples, 4))
        annotations, _ = loss.prepare(batch, seed=number)
        known = {
            name: unpack(array, batch.lengths)
            for name, array in annotations._asdict().items()
            if array is not None
        }
        samples = [
            replace(s, **{name: parts[i] for name, parts in known.items()}) for i, s in enumerate(samples)
        ]
        batch = pack(samples, denominators(samples, 4)).map(torch.as_tensor)
        for _ in range(NUM_EPOCHS):
            table = torch.log_softmax(logits, 1)
            logprobs = table[torch.tensor([0, 0, 0, 1]).repeat(len(samples)), batch.token_ids]
            value, _ = loss(ModelOutputs(logprobs=logprobs), batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    first, second = torch.softmax(logits.detach(), 1)
    return float(first[1] * second[0])


def variant(name: str, **settings) -> AlgorithmSettings:
    """The variant, with a share of tokens large enough to choose some of 64."""
    arguments = {"pg_args": {"fraction": 0.05}} if name.endswith("_cov") else {}
    return AlgorithmSettings(pg_variant=name, **arguments, **settings)


@pytest.mark.parametrize("name", PG_VARIANTS)
def test_every_variant_learns(name):
    assert train(variant(name)) > 0.7


@pytest.mark.parametrize("name", PG_VARIANTS)
def test_with_the_sign_flipped_every_variant_unlearns(name):
    assert train(variant(name), sign=-1.0) < 0.02


@pytest.mark.parametrize(
    "name", [name for name, spec in PG_VARIANTS.items() if "segment" in spec.granularities]
)
def test_ratios_over_turns_learn(name):
    assert train(variant(name, ratio_type="segment")) > 0.7


@pytest.mark.parametrize("granularity", ["token", "segment", "geometric", "sequence"])
@pytest.mark.parametrize("kind", ["weights", "band"])
def test_a_drifted_sampler_s_batches_are_learnt_from_once_corrected(kind, granularity):
    weights = Correction(ImportanceWeight(granularity))
    band = Correction(filters=(RatioBand(granularity, 0.5, 2.5),))
    settings = variant("ppo", train_infer_correction=weights if kind == "weights" else band)
    assert train(settings, drift=DRIFT) > 0.7
