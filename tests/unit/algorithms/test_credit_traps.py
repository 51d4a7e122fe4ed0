"""Mistakes that published frameworks have made in credit: each once here, by name."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import build, episode, group_of

from turnwise.algorithms.settings import RewardNormalization
from turnwise.batching.plan import optimizer_steps
from turnwise.spec import ESTIMATORS
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import samples_of

MEAN = RewardNormalization(method="mean")
STEPS_ALONE = {"episode_reward_weight": 0.0}


def advantages(trajectory):
    """The advantages of the trained tokens, in order."""
    return np.concatenate([s.advantages[s.response_mask] for s in trajectory.samples]).tolist()


@pytest.mark.parametrize("grouping", ["traj_group_id", "batch", "tags"])
def test_buckets_do_not_merge_tasks_whatever_the_grouping_of_episodes(grouping):
    """Two groups, even of one task id, with step returns (1, 0) and (5, 5) in an equal-looking state."""
    groups = [
        group_of(episode([1.0], ["s"]), episode([0.0], ["s"], sibling=1)),
        group_of(episode([5.0], ["s"]), episode([5.0], ["s"], sibling=1)),
    ]
    build("gigpo", reward_normalization=RewardNormalization(grouping, "mean"), **STEPS_ALONE).credit(groups)
    assert [advantages(t) for group in groups for t in group.trajectories] == [[0.5], [-0.5], [0], [0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"reward_normalization": MEAN},
        {"reward_normalization": RewardNormalization(method="asym_clip")},
        {"reward_normalization": RewardNormalization(norm_mean_type="batch")},
        {"reward_normalization": RewardNormalization(norm_std_type="batch")},
        {"reward_normalization": RewardNormalization(norm_std_type="running")},
        {"reward_clip": 0.3},
        {"step_reward_gamma": 0.3},
        {"reward_placement": "final"},
        {"whiten_rewards": True},
    ],
    ids=str,
)
def test_options_of_gigpo_reach_the_step_part(changes, make_nested):
    results = []
    for settings in ({}, changes):
        found = []
        for seed in range(4):
            groups = make_nested(seed, smallest=3)
            build("gigpo", **STEPS_ALONE, **settings).credit(groups)
            found += [sample.advantages for sample in samples_of(groups)]
        results.append(np.concatenate(found))
    assert not np.allclose(results[0], results[1], atol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo", "gpg", "grpo_passk"])
@pytest.mark.parametrize("is_stepwise", [False, True], ids=["long", "of many samples"])
def test_episode_statistics_are_over_trajectories_however_long(name, is_stepwise):
    """Rows of a long episode would count many times, as tokens or as one sample a turn."""
    settings = {"step_reward_weight": 0.0} if name == "gigpo" else {}
    found = []
    for num_turns in (1, 7):
        first = episode([0.0] * (num_turns - 1) + [1.0], lengths=num_turns, is_stepwise=is_stepwise)
        group = group_of(first, episode([0.0], sibling=1), episode([0.5], sibling=2))
        build(name, **settings).credit([group])
        found.append([set(advantages(t)) for t in group.trajectories])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_observations_and_padding_are_no_steps(name):
    """Longer prompts between the same responses give the same advantages, discounts or not."""
    found = []
    for prompt in (1, 9):
        trajectories = [episode([1.0, -0.5, 2.0], lengths=2, prompt=prompt, sibling=i) for i in range(2)]
        trajectories[1].turns[0].reward = 3.0
        for trajectory in trajectories:
            for sample in trajectory.samples:
                sample.values = np.where(sample.response_mask, np.float32(0.3), np.float32("nan"))
                sample.next_values = sample.values
        group = group_of(*trajectories)
        group.greedy = episode([1.0])
        build(name, gamma=0.9, lambd=0.9, step_reward_gamma=0.9).credit([group])
        found.append([advantages(t) for t in trajectories])
    assert found[0] == found[1] and len(found[0][0]) == 6


@pytest.mark.parametrize(
    "name", ["reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "step_reinforce"]
)
def test_whitening_one_token_is_no_nan(name):
    group = group_of(episode([3.0]))
    metrics = reduce_metrics(build(name, whiten_advantages=True).credit([group]))
    assert np.isfinite(advantages(group.trajectories[0])).all() and np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize(
    "name", ["reinforce", "agentic_reinforce", "step_reinforce", "reinforce_plus_plus", "gae"]
)
def test_a_reward_on_a_masked_position_is_not_lost(name):
    """The last token of each turn is masked, by a filter say: its reward stands on the last one before it."""
    identity = {"reward_normalization": RewardNormalization(method="identity"), "step_reward_gamma": 1.0}
    trajectory = episode([1.0, 2.0], lengths=3)
    [sample] = trajectory.samples
    sample.response_mask[[span.stop - 1 for span in sample.turn_spans]] = False
    sample.values = sample.next_values = np.zeros(sample.num_tokens, np.float32)
    metrics = reduce_metrics(build(name, **identity).credit([group_of(trajectory)]))
    assert metrics["critic/rewards/mean"] == 3.0
    if not ESTIMATORS[name].whitens_advantages:
        assert advantages(trajectory)[0] == 3.0


def test_no_row_is_duplicated_before_group_statistics():
    """A batch that fills no whole optimiser step is neither copied nor cut: 7 samples of 3 siblings, 4 a
    step."""
    scores = {1: 0.0, 2: 1.0, 4: 5.0}
    siblings = [
        episode(
            [*[0.0] * (turns - 1), score],
            sibling=turns,
            is_stepwise=True,
            states=[f"{turns}/{t}" for t in range(turns)],
        )
        for turns, score in scores.items()
    ]
    build("grpo", reward_normalization=MEAN).credit([group_of(*siblings)])
    assert [set(advantages(trajectory)) for trajectory in siblings] == [
        {score - 2.0} for score in scores.values()
    ]
    [epoch] = optimizer_steps(len(samples_of([group_of(*siblings)])), 4, seed=0)
    assert sorted(index for step in epoch for index in step) == list(range(7))
