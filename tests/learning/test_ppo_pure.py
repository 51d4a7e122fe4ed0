"""PPO's credit and losses on tables instead of models learn an episode of two turns; with its sign flipped each unlearns.

A turn shows one of four symbols and wants it back as the first of its two tokens; the second means nothing. Each right turn is
worth 1, so a state before the first turn is worth 2 to a policy that has learnt, and one before the second turn 1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.token_estimator import PPO
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.types import Group, ModelOutputs, Task, Trajectory, Turn, samples_of

NUM_SYMBOLS, NUM_TURNS, NUM_EPISODES, NUM_STEPS = 4, 2, 32, 60
TASK = Task(id="repeat", tag="repeat", split="train", seed=0)


def play(logits: torch.Tensor, generator: torch.Generator) -> list[Group]:
    """Episodes whose prompts are one symbol; a token's context is (turn, symbol, position in the turn)."""
    symbols = torch.randint(NUM_SYMBOLS, (NUM_EPISODES, NUM_TURNS), generator=generator)
    logprobs = torch.log_softmax(logits.detach(), -1)[torch.arange(NUM_TURNS), symbols]
    drawn = torch.multinomial(logprobs.exp().view(-1, NUM_SYMBOLS), 1, generator=generator).view(*symbols.shape, 2)
    sampled = logprobs.gather(-1, drawn[..., None]).squeeze(-1)
    groups = []
    for prompts, responses, lp in zip(symbols.numpy(), drawn.numpy(), sampled.numpy(), strict=True):
        turns = [
            Turn(prompts[k : k + 1], responses[k], lp[k], reward=float(responses[k, 0] == prompts[k])) for k in range(NUM_TURNS)
        ]
        trajectory = Trajectory(TASK, 0, turns=turns)
        trajectory.samples = build_samples(trajectory)
        groups.append(Group(TASK, [trajectory]))
    return groups


def at_tokens(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The table's entries [N, …] for the contexts of all tokens of an episode: symbol, two tokens, symbol, two tokens, …

    Entries at the symbols themselves mean nothing: they are outside the mask.
    """
    position = torch.arange(len(token_ids)) % (3 * NUM_TURNS)
    symbol = token_ids[torch.arange(len(token_ids)) - position % 3]
    return table[position // 3, symbol, (position % 3 - 1).clamp(min=0)]


def train(granularity: str, advantage_sign: float = 1.0, value_sign: float = 1.0, **settings) -> tuple[float, torch.Tensor]:
    """Probability of the right symbol, and the values of the two turns' first tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(NUM_TURNS, NUM_SYMBOLS, 2, NUM_SYMBOLS, requires_grad=True)
    values = torch.zeros(NUM_TURNS, NUM_SYMBOLS, 2, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    algorithm = PPO(AlgorithmSettings(adv_estimator="gae", gae_granularity=granularity, **settings))
    for _ in range(NUM_STEPS):
        groups = play(logits, generator)
        samples = samples_of(groups)
        for sample in samples:
            sample.values = at_tokens(values, torch.from_numpy(sample.token_ids)).detach().numpy()
            sample.next_values = np.zeros(sample.num_tokens, np.float32)
        algorithm.credit(groups)
        for sample in samples:
            sample.advantages = advantage_sign * sample.advantages
        batch = pack(samples, denominators(samples, max_length=6)).map(torch.as_tensor)
        chosen = at_tokens(torch.log_softmax(logits, -1), batch.token_ids).gather(-1, batch.token_ids[:, None]).squeeze(-1)
        policy_loss, _ = algorithm.loss(ModelOutputs(logprobs=chosen), batch)
        value_loss, _ = algorithm.value_loss(ModelOutputs(values=at_tokens(values, batch.token_ids)), batch)
        optimizer.zero_grad()
        (policy_loss + value_sign * value_loss).backward()
        optimizer.step()
    right = torch.softmax(logits, -1)[:, torch.arange(NUM_SYMBOLS), 0, torch.arange(NUM_SYMBOLS)]
    return right.mean().item(), values.detach()[:, :, 0].mean(-1)


@pytest.mark.parametrize("granularity", ["token", "turn"])
@pytest.mark.parametrize("settings", [{}, {"whiten_advantages": True, "value_clip": 0.5}], ids=["plain", "whitened"])
def test_policy_and_values_are_learnt(granularity, settings):
    right, values = train(granularity, **settings)
    assert right > 0.9
    assert values.tolist() == pytest.approx([2.0, 1.0], abs=0.25)


@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_with_the_sign_of_the_advantages_flipped_it_is_unlearnt(granularity):
    assert train(granularity, advantage_sign=-1.0)[0] < 0.05


@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_with_the_sign_of_the_value_loss_flipped_values_run_away(granularity):
    _, values = train(granularity, value_sign=-1.0)
    assert (values - torch.tensor([2.0, 1.0])).abs().min() > 1.0
