"""Every estimator teaches a table to repeat what it is shown over two turns, from chance; with the sign
flipped it unlearns.

The siblings of a group are shown the same symbols, one a turn, and want each back as the first of their two
tokens; the second means nothing. Estimators that compare siblings also get luck: some groups score more
whatever they do, so that comparing across groups would teach noise.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.errors import ConfigError
from turnwise.runtime.entry_points import load_class
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, ModelOutputs, Task, Trajectory, Turn, samples_of

NUM_SYMBOLS, NUM_TURNS, NUM_GROUPS, GROUP_SIZE, NUM_STEPS, PPO_STEPS = 4, 2, 8, 4, 20, 60
LUCK = 100.0


class World:
    """Plays the table's policy. `turn_luck` is what each episode may earn in its first turn, whatever it
    does."""

    def __init__(self, luck: float = 0.0, turn_luck: float = 0.0, is_stepwise: bool = False) -> None:
        self.luck, self.turn_luck, self.is_stepwise = luck, turn_luck, is_stepwise
        self.generator = torch.Generator().manual_seed(0)

    def play(self, logits: torch.Tensor) -> list[Group]:
        symbols = torch.randint(NUM_SYMBOLS, (NUM_GROUPS, NUM_TURNS), generator=self.generator)
        each = symbols.repeat_interleave(GROUP_SIZE, 0)
        logprobs = torch.log_softmax(logits.detach(), -1)[torch.arange(NUM_TURNS), each]
        drawn = torch.multinomial(logprobs.exp().view(-1, NUM_SYMBOLS), 1, generator=self.generator).view(
            *each.shape, 2
        )
        lucky = torch.rand(len(each), generator=self.generator) < 0.5
        groups = []
        for g, shown in enumerate(symbols.tolist()):
            task = Task(id=str(g), tag="repeat", split="train", seed=g)
            rows = range(g * GROUP_SIZE, (g + 1) * GROUP_SIZE)
            group = [
                self.episode(task, i % GROUP_SIZE, shown, drawn[i].tolist(), self.turn_luck * bool(lucky[i]))
                for i in rows
            ]
            best = logprobs[g * GROUP_SIZE].argmax(-1).tolist()
            groups.append(Group(task, group, index=g, greedy=self.episode(task, 0, shown, best, 0.0)))
        return groups

    def episode(
        self, task: Task, sibling: int, shown: list[int], said: list[list[int]], extra: float
    ) -> Trajectory:
        turns = [
            Turn(
                prompt_ids=np.array([symbol]),
                response_ids=np.array(response),
                logprobs=np.zeros(2, np.float32),
                reward=float(response[0] == symbol) + (extra if k == 0 else 0.0),
                state_key=(k, symbol),
                observation=str(symbol),
                starts_context=self.is_stepwise,
            )
            for k, (symbol, response) in enumerate(zip(shown, said, strict=True))
        ]
        trajectory = Trajectory(
            task, sibling, turns=turns, outcome_rewards={"luck": self.luck * (task.seed % 2)}
        )
        trajectory.samples = build_samples(trajectory)
        return trajectory


def contexts(groups: list[Group]) -> torch.Tensor:
    """`(turn, symbol, position in the turn)` of every token [N, 3]; anything outside the mask."""
    rows = []
    for group in groups:
        for trajectory in group.trajectories:
            for sample in trajectory.samples:
                of_sample = np.zeros((sample.num_tokens, 3), np.int64)
                for span in sample.turn_spans:
                    symbol = trajectory.turns[span.turn].prompt_ids[0]
                    of_sample[span.start : span.stop] = [
                        (span.turn, symbol, p) for p in range(span.stop - span.start)
                    ]
                rows.append(of_sample)
    return torch.from_numpy(np.concatenate(rows))


def train(name: str, world: World, sign: float = 1.0, **settings) -> list[float]:
    """Probability of the right symbol in each turn after training; it starts at 0.25."""
    return learn(name, world, sign, **settings)[0]


def learn(
    name: str,
    world: World,
    sign: float = 1.0,
    value_sign: float = 1.0,
    num_steps: int = NUM_STEPS,
    **settings,
) -> tuple[list[float], list[float]]:
    """What `train` returns, and the critic's value before each turn's first token. The signs are those of the
    advantages and of the critic's loss."""
    found = load_class(ESTIMATORS[name].entry, "adv_estimator", ConfigError)
    algorithm = found(AlgorithmSettings(adv_estimator=name, **settings))
    logits = torch.zeros(NUM_TURNS, NUM_SYMBOLS, 2, NUM_SYMBOLS, requires_grad=True)
    values = torch.zeros(NUM_TURNS, NUM_SYMBOLS, 2, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.2)
    for _ in range(num_steps):
        groups = world.play(logits)
        samples = samples_of(groups)
        turn, symbol, position = contexts(groups).unbind(-1)
        if "values" in algorithm.needs:
            parts = values[turn, symbol, position].detach().split([sample.num_tokens for sample in samples])
            for sample, part in zip(samples, parts, strict=True):
                sample.values, sample.next_values = part.numpy(), np.zeros(sample.num_tokens, np.float32)
        algorithm.credit(groups)
        for sample in samples:
            sample.advantages = sign * sample.advantages
        batch = pack(samples, denominators(samples, max_length=6)).map(torch.as_tensor)
        logprobs = (
            torch.log_softmax(logits, -1)[turn, symbol, position]
            .gather(-1, batch.token_ids[:, None])
            .squeeze(-1)
        )
        loss, _ = algorithm.loss(ModelOutputs(logprobs=logprobs), batch)
        if algorithm.value_loss is not None:
            value_loss, _ = algorithm.value_loss(ModelOutputs(values=values[turn, symbol, position]), batch)
            loss = loss + value_sign * value_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = torch.softmax(logits, -1)[:, torch.arange(NUM_SYMBOLS), 0, torch.arange(NUM_SYMBOLS)]
    return right.mean(-1).tolist(), values.detach()[:, :, 0].mean(-1).tolist()


def world_of(name: str) -> World:
    is_relative = ESTIMATORS[name].compares_siblings or "greedy_sibling" in ESTIMATORS[name].needs
    return World(luck=LUCK if is_relative else 0.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_both_turns_are_learnt(name):
    assert min(train(name, world_of(name))) > 0.85


@pytest.mark.parametrize("name", ESTIMATORS)
def test_with_the_sign_flipped_both_are_unlearnt(name):
    assert max(train(name, world_of(name), sign=-1.0)) < 0.05


def test_without_a_signal_nothing_is_learnt():
    assert train("grpo", World(luck=LUCK), sign=0.0) == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(
    ("granularity", "settings"),
    [("token", {}), ("turn", {"whiten_advantages": True, "value_clip": 0.5})],
    ids=["token", "turn"],
)
def test_ppo_learns_the_values_too(granularity, settings):
    """A right turn is worth 1: two are to come before the first turn, and one before the second."""
    right, values = learn("gae", World(), num_steps=PPO_STEPS, gae_granularity=granularity, **settings)
    assert min(right) > 0.9
    assert values == pytest.approx([2.0, 1.0], abs=0.25)


@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_ppo_with_the_sign_of_one_of_its_losses_flipped_unlearns(granularity):
    options = {"num_steps": PPO_STEPS, "gae_granularity": granularity}
    assert max(train("gae", World(), sign=-1.0, **options)) < 0.05
    _, values = learn("gae", World(), value_sign=-1.0, **options)
    assert min(abs(values[0] - 2.0), abs(values[1] - 1.0)) > 1.0, "they run away"


@pytest.mark.parametrize("part", ["episode", "step"])
@pytest.mark.parametrize("is_stepwise", [False, True], ids=["one context", "a context a turn"])
def test_each_part_of_gigpo_learns_by_itself(part, is_stepwise):
    weights = {"step_reward_weight": 0.0} if part == "episode" else {"episode_reward_weight": 0.0}
    assert min(train("gigpo", World(luck=LUCK, is_stepwise=is_stepwise), **weights)) > 0.85


def test_dr_grpo_learns():
    settings = {
        "reward_normalization": RewardNormalization(method="mean"),
        "loss_agg_mode": "seq-mean-token-sum-norm",
    }
    assert min(train("grpo", World(luck=LUCK), **settings)) > 0.85


STEPWISE = {"reinforce": {}, "agentic_reinforce": {}, "gigpo": {"episode_reward_weight": 0.0}}


@pytest.mark.parametrize(("name", "settings"), STEPWISE.items(), ids=STEPWISE)
@pytest.mark.parametrize("is_stepwise", [False, True], ids=["one context", "a context a turn"])
def test_credit_on_turns_does_not_charge_a_turn_for_what_came_before(name, settings, is_stepwise):
    """The first turn earns much by luck alone. The second is learnt all the same, which no estimator on
    scores can do."""
    assert train(name, World(turn_luck=LUCK, is_stepwise=is_stepwise), **settings)[1] > 0.9


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_credit_on_scores_drowns_in_the_luck_of_another_turn(name):
    assert train(name, World(turn_luck=LUCK))[1] < 0.8
