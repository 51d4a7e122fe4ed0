"""Every estimator against its definition, written out in loops over groups, trajectories, turns and tokens.

The reference below shares no code with the package. It credits random nested data: groups of several sizes,
runs of several trajectories, contexts that branch, masked tokens, turns and trajectories without any that is
trained.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from episodes import build, gae_by_hand, token_rewards, trained

from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
from turnwise.errors import ConfigError
from turnwise.spec import ESTIMATORS
from turnwise.types import samples_of

ON_SCORES = ["grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline"]
ON_STEPS = ["step_reinforce", "gigpo"]
BETA = 0.3


# ------------------------------------------------------------------------------------------------
# reference


def mean_and_std(values, weights):
    runs = sum(weights)
    mean = sum(w * v for v, w in zip(values, weights, strict=True)) / runs
    if runs <= 1 + 1e-9:
        return mean, None
    return mean, math.sqrt(
        sum(w * (v - mean) ** 2 for v, w in zip(values, weights, strict=True)) / (runs - 1)
    )


def normalized(values, weights, method):
    """One group's `values`."""
    if method == "identity":
        return list(values)
    mean, std = mean_and_std(values, weights)
    if std is None:
        return [0.0] * len(values)
    if method == "mean":
        return [v - mean for v in values]
    scaled = [(v - mean) / (std + 1e-6) if std > 1e-6 else 0.0 for v in values]
    return [min(max(v, -1.0), 3.0) for v in scaled] if method == "asym_clip" else scaled


def normalized_by(values, weights, keys, method):
    members = defaultdict(list)
    for index, key in enumerate(keys):
        members[key].append(index)
    result = [0.0] * len(values)
    for of_group in members.values():
        for i, v in zip(
            of_group,
            normalized([values[i] for i in of_group], [weights[i] for i in of_group], method),
            strict=True,
        ):
            result[i] = v
    return result


def discounted(rewards, gamma):
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def bounded(value, bound):
    return value if bound is None else min(max(value, -bound), bound)


def whitened(values):
    if len(values) < 2:
        return list(values)
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def group_keys(rows, grouping):
    """The group of each row in which its score is compared."""
    return [{"traj_group_id": g, "tags": group.task.tag, "batch": 0}[grouping] for g, group, _ in rows]


def transformed(name, rows, scores, method, grouping):
    """The rewards of the trajectories, by an estimator on scores."""
    weights = [t.weight for _, _, t in rows]
    groups = [g for g, _, _ in rows]
    siblings = {g: [i for i, other in enumerate(groups) if other == g] for g in groups}
    if name in ("grpo", "gigpo"):
        return normalized_by(scores, weights, group_keys(rows, grouping), method)
    if name == "reinforce_plus_plus_baseline":
        return normalized_by(scores, weights, groups, "mean")
    result = []
    num_trained = [sum(len(tokens) for tokens in trained(t)[1]) for _, _, t in rows]
    # The run of each row: its own, or that of the sibling where it weighs less.
    runs = [(g, t.sibling, None if t.weight < 1 else i) for i, (g, _, t) in enumerate(rows)]
    centred = [
        s - mean_and_std([scores[j] for j in siblings[g]], [weights[j] for j in siblings[g]])[0]
        for s, g in zip(scores, groups, strict=True)
    ]
    spread = {
        g: mean_and_std([scores[j] for j in mine], [weights[j] for j in mine])[1] or 0.0
        for g, mine in siblings.items()
    }
    differing = sum(w for g, w in zip(groups, weights, strict=True) if spread[g] > 1e-6)
    for i, g in enumerate(groups):
        mine = siblings[g]
        if name == "rloo":
            others = [j for j in mine if runs[j] != runs[i]]
            rest = sum(weights[j] * scores[j] for j in others)
            result.append(scores[i] - rest / sum(weights[j] for j in others) if others else 0.0)
        elif name == "opo":
            total = sum(weights[j] * num_trained[j] for j in mine)
            result.append(
                scores[i]
                - (sum(weights[j] * num_trained[j] * scores[j] for j in mine) / total if total else 0.0)
            )
        elif name == "gpg":
            result.append(centred[i] * sum(weights) / differing if spread[g] > 1e-6 else 0.0)
        else:
            of_runs = {r: [scores[j] for j in mine if runs[j] == r] for r in {runs[j] for j in mine}}
            ranked = sorted(((sum(v) / len(v), r) for r, v in of_runs.items()), key=lambda entry: entry[0])
            _, std = mean_and_std([scores[j] for j in mine], [weights[j] for j in mine])
            is_best = runs[i] == ranked[-1][1]
            result.append((ranked[-1][0] - ranked[-2][0]) / (std + 1e-6) if is_best else 0.0)
    return result


def baseline_of(group, placement, bound):
    rewards = [turn.reward for turn in group.greedy.turns]
    rewards[-1] += sum(group.greedy.outcome_rewards.values())
    return sum(bounded(r, bound) for r in rewards) if placement == "turn" else bounded(sum(rewards), bound)


def by_hand(name, groups, s):
    """The advantage of every trained token, in the order of trajectories, turns and tokens; and those
    tokens."""
    spec = ESTIMATORS[name]
    placement = s.reward_placement or ("final" if spec.reward_placement == "final" else "turn")
    default = ("traj_group_id", "identity") if spec.normalization == "own" else spec.normalization
    method, grouping = (
        s.reward_normalization.method or default[1],
        s.reward_normalization.grouping or default[0],
    )
    beta = BETA if s.add_token_level_kl else 0.0

    def kl(sample, position):
        difference = (
            float(sample.old_logprobs[position]) - float(sample.ref_logprobs[position]) if beta else 0.0
        )
        return beta * (difference**2 / 2 if s.kl_penalty == "k2" else difference)

    rows = [(g, group, t) for g, group in enumerate(groups) for t in group.trajectories]
    tokens = [[token for of_turn in trained(t)[1] for token in of_turn] for _, _, t in rows]
    scores = [t.score - sum(kl(*token) for token in tokens[i]) for i, (_, _, t) in enumerate(rows)]
    weights = [t.weight for _, _, t in rows]
    if name in ON_SCORES:
        rewards = [bounded(r, s.reward_clip) for r in transformed(name, rows, scores, method, grouping)]
        credit = [[r] * len(of_row) for r, of_row in zip(rewards, tokens, strict=True)]
    else:
        placed = [
            token_rewards(t, placement, kl) if of_row else []
            for (_, _, t), of_row in zip(rows, tokens, strict=True)
        ]
        if name not in ON_STEPS:
            if placement == "final" and method != "identity":
                final = normalized_by(scores, weights, group_keys(rows, grouping), method)
                placed = [[[0.0] * len(of_turn) for of_turn in turns] for turns in placed]
                for turns, score in zip(placed, final, strict=True):
                    if turns:
                        turns[-1][-1] = score
            placed = [[[bounded(r, s.reward_clip) for r in of_turn] for of_turn in turns] for turns in placed]
        if s.whiten_rewards:
            flat = iter(whitened([r for turns in placed for of_turn in turns for r in of_turn]))
            placed = [[[next(flat) for _ in of_turn] for of_turn in turns] for turns in placed]
        if name in ON_STEPS:
            credit = on_steps(name, rows, placed, scores, s, method, grouping)
        else:
            credit = [
                on_tokens(name, row, placed[i], tokens[i], s, placement) if tokens[i] else []
                for i, row in enumerate(rows)
            ]
    flat = [a for of_row in credit for a in of_row]
    if s.whiten_advantages or spec.whitens_advantages:
        flat = whitened(flat)
    return [bounded(a, s.advantage_clip) for a in flat], [token for of_row in tokens for token in of_row]


def on_tokens(name, row, placed, tokens, s, placement):
    _, group, trajectory = row
    flat = [r for of_turn in placed for r in of_turn]
    if name in ("reinforce", "reinforce_plus_plus"):
        return discounted(flat, s.gamma)
    if name == "remax":
        return [g - baseline_of(group, placement, s.reward_clip) for g in discounted(flat, s.gamma)]
    if name == "agentic_reinforce":
        returns = discounted([sum(of_turn) for of_turn in placed], s.gamma)
        return [c for c, of_turn in zip(returns, placed, strict=True) for _ in of_turn]
    sample, position = tokens[-1]
    is_cut = s.bootstrap_on_truncation and trajectory.limit == "environment"
    values = [float(sample.values[position]) for sample, position in tokens]
    return gae_by_hand(
        flat, values, float(sample.next_values[position]) if is_cut else 0.0, s.gamma, s.lambd or 1.0
    )


def on_steps(name, rows, placed, scores, s, method, grouping):
    entries = []
    for i, ((g, _, trajectory), turns) in enumerate(zip(rows, placed, strict=True)):
        returns = discounted([sum(of_turn) for of_turn in turns], s.step_reward_gamma)
        for k, (index, value) in enumerate(
            zip(trained(trajectory)[0] if turns else [], returns, strict=True)
        ):
            entries.append((i, k, g, trajectory.turns[index].state_key, trajectory.weight, value))
    values, weights = [e[5] for e in entries], [e[4] for e in entries]
    if name == "gigpo":
        steps = normalized_by(values, weights, [e[2:4] for e in entries], method)
        episodes = [bounded(r, s.reward_clip) for r in transformed("gigpo", rows, scores, method, grouping)]
    else:
        of_rows = group_keys(rows, grouping)
        steps = normalized_by(values, weights, [of_rows[e[0]] for e in entries], method)
    result = [[] for _ in rows]
    for (i, k, *_), step in zip(entries, steps, strict=True):
        advantage = bounded(step, s.reward_clip)
        if name == "gigpo":
            advantage = s.episode_reward_weight * episodes[i] + s.step_reward_weight * advantage
        result[i] += [advantage] * len(placed[i][k])
    return result


# ------------------------------------------------------------------------------------------------
# tests

KL = {"add_token_level_kl": True, "init_kl_coef": BETA}
CHANGES = {
    "plain": {},
    "kl and clips": KL | {"reward_clip": 0.8, "advantage_clip": 0.7},
    "whitened advantages": {"whiten_advantages": True},
    "discounted": {"gamma": 0.6, "step_reward_gamma": 0.5, "lambd": 0.7, "bootstrap_on_truncation": False},
    "final": KL | {"reward_placement": "final", "gamma": 0.9},
    "turn": KL | {"reward_placement": "turn", "gamma": 0.9, "reward_clip": 0.8},
    "weighed": {"episode_reward_weight": 0.25, "step_reward_weight": 2.0},
    "whitened rewards": {"whiten_rewards": True, "gamma": 0.9},
    "mean": KL
    | {"reward_normalization": RewardNormalization(method="mean"), "reward_placement": "final", "gamma": 0.9},
    "over tags": {"reward_normalization": RewardNormalization(grouping="tags"), "reward_placement": "final"},
    "over the batch": KL
    | {
        "reward_normalization": RewardNormalization("batch", "asym_clip"),
        "reward_placement": "final",
        "reward_clip": 1.5,
    }
    | {"kl_penalty": "k2"},
}


def is_refused(name, changes):
    asked = changes.get("reward_normalization")
    is_own = asked is not None and ESTIMATORS[name].normalization == "own"
    return is_own or (name == "remax" and "whiten_rewards" in changes)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_credit_equals_the_definition_on_nested_data(name, changes, make_nested):
    if is_refused(name, changes):
        with pytest.raises(ConfigError, match=r"own way|use whiten_advantages"):
            build(name, **changes)
        return
    algorithm = build(name, **changes)
    for seed in range(4):
        groups = make_nested(seed, smallest=2 if name == "grpo_passk" else 1)
        expected, tokens = by_hand(name, groups, AlgorithmSettings(adv_estimator=name, **changes))
        algorithm.credit(groups)
        for sample in samples_of(groups):
            assert (
                sample.advantages.dtype == np.float32 and not sample.advantages[~sample.response_mask].any()
            )
        got = [float(sample.advantages[position]) for sample, position in tokens]
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "granularity"), [*((name, "token") for name in ESTIMATORS), ("gae", "turn")]
)
def test_what_lies_outside_the_mask_is_never_read(name, granularity, make_nested):
    algorithm = build(name, gae_granularity=granularity, **KL)
    results = []
    for poison in (np.float32("nan"), np.float32(1e6)):
        groups = make_nested(3, smallest=2)
        for sample in samples_of(groups):
            for array in (
                sample.old_logprobs,
                sample.ref_logprobs,
                sample.values,
                sample.next_values,
                sample.rollout_logprobs,
            ):
                array[~sample.response_mask] = poison
        metrics = algorithm.credit(groups)
        written = [
            array for s in samples_of(groups) for array in (s.advantages, s.returns) if array is not None
        ]
        assert all(np.isfinite(array).all() for array in written)
        results.append(([array.tolist() for array in written], metrics))
    assert results[0] == results[1]
