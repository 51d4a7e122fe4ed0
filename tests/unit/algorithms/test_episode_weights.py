"""The parts of an episode weigh together what the same tokens weigh in one context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.algorithms.losses import PolicyLoss, token_factors
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight
from turnwise.batching.pack import pack, unpack
from turnwise.batching.plan import denominators, episode_tokens, episodes, optimizer_steps
from turnwise.batching.samples import build_samples
from turnwise.spec import LOSS_AGG_MODES
from turnwise.types import ModelOutputs, Sample, Task, Trajectory, Turn

MAX_LENGTH = 20
TASK = Task("t", "T", "train", 0)


def episode(lengths: Sequence[int], starts: Sequence[int] = (), contexts_are: str = "parts") -> Trajectory:
    """An episode whose turns have these numbers of tokens; a new context starts at the turns `starts`."""
    turns = []
    for number, length in enumerate(lengths):
        zeros = np.zeros(length, np.float32)
        turn = Turn(np.array([1]), np.full(length, 2), zeros, starts_context=number == 0 or number in starts)
        turns.append(turn)
    return Trajectory(TASK, 0, turns, contexts_are=contexts_are)  # type: ignore[arg-type]


TABLE = {
    "token-mean": (0.25, 0.75),
    "seq-mean-token-sum": (5, 15),
    "seq-mean-token-mean": (0.5, 0.5),
    "seq-mean-token-sum-norm": (0.05, 0.15),
}
AS_STEPS = {
    "token-mean": (0.25, 0.75),
    "seq-mean-token-sum": (2.5, 7.5),
    "seq-mean-token-mean": (0.25, 0.75),
    "seq-mean-token-sum-norm": (0.025, 0.075),
}


def weights_of_siblings(siblings: Sequence[Trajectory], mode: str) -> list[float]:
    """Σ of the factors of each sibling's tokens."""
    of_siblings = [build_samples(sibling) for sibling in siblings]
    samples = [sample for samples in of_siblings for sample in samples]
    batch = pack(samples, denominators(samples, 100), episode_tokens(samples)).map(torch.as_tensor)
    factors = token_factors(
        batch.response_mask,
        batch.weights,
        batch.sequence_id,
        len(samples),
        batch.denominators,
        mode,  # type: ignore[arg-type]
        batch.episode_tokens,
    )
    sums = [float(part.sum()) for part in unpack(factors.numpy(), batch.lengths)]
    first = len(of_siblings[0])
    return [sum(sums[:first]), sum(sums[first:])]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("starts", [(), (1, 2)], ids=["one context", "three contexts"])
def test_the_table_of_the_design(mode: str, starts: tuple[int, ...]) -> None:
    siblings = [episode([10]), episode([5, 5, 20], starts)]
    assert weights_of_siblings(siblings, mode) == pytest.approx(TABLE[mode], rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_contexts_that_are_steps_weigh_as_samples(mode: str) -> None:
    siblings = [episode([10]), episode([5, 5, 20], (1, 2), "steps")]
    assert weights_of_siblings(siblings, mode) == pytest.approx(AS_STEPS[mode], rel=1e-6)


LENGTHS = (3, 1, 4, 2, 5)
CUTS = {1: (), 2: (2,), 5: (1, 2, 3, 4)}
VARIANTS = {
    "ppo": AlgorithmSettings(pg_variant="ppo"),
    "cispo": AlgorithmSettings(pg_variant="cispo"),
    "vanilla": AlgorithmSettings(pg_variant="vanilla"),
    "tis": AlgorithmSettings(
        pg_variant="ppo", train_infer_correction=Correction(ImportanceWeight("token", cap=1.05))
    ),
}


def loss_and_gradient(
    settings: AlgorithmSettings, num_contexts: int, is_split: bool
) -> tuple[float, torch.Tensor]:
    """The step's loss on a cut episode and another one, and the gradient by the log-prob of each token in
    the order of turns."""
    rng = np.random.default_rng(5)
    siblings = [episode(LENGTHS, CUTS[num_contexts]), episode([6])]
    num_tokens = sum(LENGTHS) + 6
    arrays = {
        name: rng.normal(size=num_tokens).astype(np.float32) for name in ("old", "new", "rollout", "adv")
    }
    parameters = torch.tensor(arrays["old"] / 4 + arrays["new"] / 8, requires_grad=True)
    samples: list[Sample] = []
    places: list[list[int]] = []
    position = 0
    for sibling in siblings:
        for sample in build_samples(sibling):
            size = sample.num_trained
            own = slice(position, position + size)
            for name, values in (
                ("old_logprobs", arrays["old"] / 4),
                ("rollout_logprobs", arrays["old"] / 4 + arrays["rollout"] / 20),
                ("advantages", arrays["adv"] + 1.5),
            ):
                array = np.zeros(sample.num_tokens, np.float32)
                array[sample.response_mask] = values[own]
                setattr(sample, name, array)
            samples.append(sample)
            places.append(list(range(position, position + size)))
            position += size
    loss = PolicyLoss(settings)
    divisors = denominators(samples, MAX_LENGTH)
    counts = episode_tokens(samples)
    annotations, _ = loss.prepare(pack(samples, divisors, counts), seed=0)
    cuts = [[index] for index in range(len(samples))] if is_split else [list(range(len(samples)))]
    offsets = np.cumsum([0, *(sample.num_tokens for sample in samples)])
    total = torch.zeros(())
    for cut in cuts:
        batch = pack([samples[i] for i in cut], divisors, [counts[i] for i in cut]).map(torch.as_tensor)
        if annotations.importance is not None:
            own = np.concatenate([annotations.importance[offsets[i] : offsets[i + 1]] for i in cut])
            batch.importance = torch.as_tensor(own)
        logprobs = torch.zeros(batch.num_tokens)
        logprobs[batch.response_mask] = parameters[[place for i in cut for place in places[i]]]
        total = total + loss(ModelOutputs(logprobs=logprobs), batch)[0]
    total.backward()
    assert parameters.grad is not None
    return float(total.detach()), parameters.grad


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cut_episode_has_the_loss_and_gradient_of_an_uncut_one(variant: str, mode: str) -> None:
    settings = replace(VARIANTS[variant], loss_agg_mode=mode)
    expected, gradient = loss_and_gradient(settings, 1, is_split=False)
    assert gradient.abs().max() > 0
    for num_contexts in CUTS:
        for is_split in (False, True):
            value, other = loss_and_gradient(settings, num_contexts, is_split)
            assert value == pytest.approx(expected, rel=1e-6)
            assert (other - gradient).norm() <= 1e-6 * gradient.norm()


def test_an_optimiser_step_has_as_many_episodes_as_it_would_have_uncut_ones() -> None:
    trajectories = [episode(LENGTHS, CUTS[number]) for number in (1, 2, 5, 5, 2, 1, 5, 2)]
    samples = [sample for trajectory in trajectories for sample in build_samples(trajectory)]
    parts = episodes(samples)
    assert len(parts) == 8 and len(samples) == 23
    plan = optimizer_steps(len(parts), 4, seed=0)
    assert [len(step) for step in plan[0]] == [4, 4]
    assert sorted(index for step in plan[0] for part in step for index in parts[part]) == list(range(23))
