"""The worked numbers of docs/algorithms.md and docs/losses.md, from the keys of a config to advantages and
losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_configs import config_of

from turnwise.algorithms.kl import KLController
from turnwise.batching.pack import pack, unpack
from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.examine.algorithm import make_algorithm
from turnwise.spec import PG_VARIANTS
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Group, ModelOutputs, Sample, Task, Trajectory, Turn, TurnSpan, samples_of

MODES = pytest.mark.parametrize("is_stepwise", [False, True], ids=["one context", "a context a turn"])
MEAN = {"reward_normalization": {"method": "mean"}}


def algorithm_of(**keys):
    config = config_of(**keys)
    return make_algorithm(config, KLController(config.init_kl_coef, config.target_kl, config.kl_horizon))


def episode(rewards, states=None, length=1, sibling=0, is_stepwise=False, weight=1.0):
    """One turn a reward, each a prompt token and `length` sampled ones."""
    turns = [
        Turn(
            np.zeros(1),
            np.zeros(length),
            np.zeros(length, np.float32),
            reward=r,
            state_key=s,
            starts_context=is_stepwise,
        )
        for r, s in zip(rewards, states or rewards, strict=True)
    ]
    trajectory = Trajectory(Task("t", "T", "train", 0), sibling, turns=turns, weight=weight)
    trajectory.samples = build_samples(trajectory)
    return trajectory


def group_of(*trajectories, index=0):
    return Group(trajectories[0].task, list(trajectories), index=index)


def credited(groups, **keys):
    """The advantages of all tokens, in their order; 0 on prompts."""
    algorithm_of(**keys).credit(groups)
    return np.concatenate([sample.advantages for sample in samples_of(groups)]).tolist()


@MODES
@pytest.mark.parametrize(
    ("gamma", "expected"), [(1.0, [3, 3, 3, 2, 2, 2]), (0.5, [0.3125, 0.625, 1.25, 0.5, 1, 2])]
)
def test_reinforce(gamma, expected, is_stepwise):
    got = credited(
        [group_of(episode([1.0, 2.0], length=3, is_stepwise=is_stepwise))],
        adv_estimator="reinforce",
        gamma=gamma,
    )
    assert got == [0, *expected[:3], 0, *expected[3:]]


@MODES
def test_agentic_reinforce(is_stepwise):
    groups = [group_of(episode([1.0, 2.0], length=2, is_stepwise=is_stepwise))]
    assert credited(groups, adv_estimator="agentic_reinforce", gamma=0.5) == [0, 2, 2, 0, 2, 2]


@MODES
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lambd": 0.95}, [0, 2.530575, 2.5585, 0, 1.43, 1.4]),
        ({}, [0, 2.8, 2.7, 0, 1.5, 1.4]),
        # δ = 1 + 0.5 − 0.2 and 2 − 0.5, a turn: A = 1.3 + 0.95·1.5
        ({"gae_granularity": "turn"}, [0, 2.725, 2.725, 0, 1.5, 1.5]),
    ],
    ids=["a token", "λ 1", "a turn, λ 0.95"],
)
def test_gae(keys, expected, is_stepwise):
    groups = [group_of(episode([1.0, 2.0], length=2, is_stepwise=is_stepwise))]
    values = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    for sample in samples_of(groups):
        sample.values = np.array([next(values) for _ in range(sample.num_tokens)], np.float32)
        sample.next_values = np.full(sample.num_tokens, 9.0, np.float32)
    assert credited(groups, adv_estimator="gae", **keys) == pytest.approx(expected, abs=1e-6)


@MODES
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 0), [0.7, 0.7, 0.7, -0.4, -0.4, -0.3]),
        ((0, 1), [0.633333, 0.525, 0, -0.364167, -0.525, -0.269167]),
        ((1, 1), [1.333333, 1.225, 0.7, -0.764167, -0.925, -0.569167]),
    ],
    ids=["episodes", "steps", "both"],
)
def test_gigpo(weights, expected, is_stepwise):
    group = group_of(
        episode([0, 0, 1], ["s0", "s1", "s2"], is_stepwise=is_stepwise),
        episode([0, -0.1], ["s0", "s1"], sibling=1, is_stepwise=is_stepwise),
        episode([0], ["s0"], sibling=2, is_stepwise=is_stepwise),
    )
    episode_weight, step_weight = weights
    keys = {
        "adv_estimator": "gigpo",
        "episode_reward_weight": episode_weight,
        "step_reward_weight": step_weight,
    } | MEAN
    assert credited([group], **keys)[1::2] == pytest.approx(expected, abs=1e-6)


def test_gigpo_in_two_groups_that_look_alike():
    groups = [
        group_of(*(episode([r], ["s"], sibling=i) for i, r in enumerate(rs)), index=g)
        for g, rs in enumerate([(1, 0), (5, 5)])
    ]
    assert credited(groups, adv_estimator="gigpo", episode_reward_weight=0, **MEAN)[1::2] == [0.5, -0.5, 0, 0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (MEAN, [0.5, -0.5, -0.5, 0.5, 0, 0]),
        ({}, [0.866024, -0.866024, -0.866024, 0.866024, 0, 0]),
        (
            {"reward_normalization": {"grouping": "batch"}},
            [-0.243975, -0.975899, -0.975899, -0.243975, 1.219874, 1.219874],
        ),
        ({"adv_estimator": "rloo"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0]),
        ({"adv_estimator": "gpg"}, [0.75, -0.75, -0.75, 0.75, 0, 0]),
        ({"adv_estimator": "grpo_passk"}, [0, 0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_scores_of_two_groups(keys, expected):
    groups = [
        group_of(*(episode([s], sibling=i) for i, s in enumerate(ss)), index=g)
        for g, ss in enumerate([(1, 0, 0, 1), (3, 3)])
    ]
    assert credited(groups, **keys)[1::2] == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------------------------------------
# losses


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.2),
        ("seq-mean-token-sum", 10.5),
        ("seq-mean-token-mean", 3.75),
        ("seq-mean-token-sum-norm", 2.625),
    ],
)
def test_aggregations(mode, expected):
    """`vanilla` with A = −1 has the loss lp at each token. Sequences begin with a prompt token more than in
    the docs."""
    samples = []
    for number in (2, 3):
        mask = np.array([False, *(position < number for position in range(4))])
        arrays = {"rollout_logprobs": np.zeros(5, np.float32), "advantages": np.full(5, -1, np.float32)}
        samples.append(
            Sample(np.zeros(5, np.int64), mask, turn_spans=(TurnSpan(0, 1, 1 + number),), **arrays)
        )
    loss = algorithm_of(pg_variant="vanilla", loss_agg_mode=mode, sequence_length=4).loss
    batch = pack(samples, denominators(samples, 4)).map(torch.as_tensor)
    value, _ = loss(ModelOutputs(logprobs=torch.tensor([0.0, 1, 2, 3, 4, 0, 5, 6, 7, 8])), batch)
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("coef", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kl_type", "expected"), [("k2", [0.02, 0.125, 0]), ("low_var", [0.018731, 0.148721, 0])]
)
def test_kl_in_the_loss_is_measured_whatever_its_coefficient(kl_type, expected, coef):
    sample = Sample(np.zeros(4, np.int64), np.arange(4) > 0, np.zeros(4, np.float32), (TurnSpan(0, 1, 4),))
    sample.advantages, sample.ref_logprobs = (
        np.zeros(4, np.float32),
        np.array([0, -1.2, -1.5, -0.5], np.float32),
    )
    batch = pack([sample], denominators([sample], 8)).map(torch.as_tensor)
    loss = algorithm_of(use_kl_loss=True, kl_loss_type=kl_type, kl_loss_coef=coef).loss
    value, metrics = loss(ModelOutputs(logprobs=torch.tensor([0.0, -1, -2, -0.5])), batch)
    assert reduce_metrics(metrics)["actor/kl_loss"] == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert value.item() == pytest.approx(coef * sum(expected) / 3, abs=1e-6)


def stepped(is_stepwise, rng, **keys):
    """Loss and gradient of an optimiser step on the same turns, in one context an episode or in one a
    turn."""
    shapes = [(2, 1.0), (3, 0.5), (4, 0.5)]
    played = [
        episode([0.0, 1.0, 0.5], length=n, is_stepwise=is_stepwise, weight=weight) for n, weight in shapes
    ]
    samples = samples_of([group_of(*played)])
    flat = {
        name: rng.normal(scale=0.4, size=sum(s.num_tokens for s in samples)).astype(np.float32)
        for name in ("old", "samp", "adv", "lp")
    }
    lengths = [sample.num_tokens for sample in samples]
    parts = {name: unpack(array, lengths) for name, array in flat.items()}
    for index, sample in enumerate(samples):
        sample.old_logprobs, sample.rollout_logprobs = parts["old"][index], parts["samp"][index]
        sample.advantages = parts["adv"][index]
    loss = algorithm_of(**keys).loss
    annotations, _ = loss.prepare(pack(samples, denominators(samples, 64)), seed=3)
    known = {
        name: unpack(array, lengths) for name, array in annotations._asdict().items() if array is not None
    }
    samples = [
        replace(s, **{name: arrays[i] for name, arrays in known.items()}) for i, s in enumerate(samples)
    ]
    logprobs = torch.tensor(flat["lp"], requires_grad=True)
    value, _ = loss(
        ModelOutputs(logprobs=logprobs), pack(samples, denominators(samples, 64)).map(torch.as_tensor)
    )
    value.backward()
    return value.item(), logprobs.grad


CORRECTED = {
    "is_weight": {"weight_type": "segment", "upper_bound": 1.1},
    "filters": [{"agg_type": "token", "ratio_low": 0.6, "ratio_high": 1.7}],
}


RATIOS = [
    (name, ratio_type)
    for name, spec in PG_VARIANTS.items()
    for ratio_type in (None, "segment")
    if (ratio_type in spec.granularities if ratio_type else spec.granularities[:1] != ("geometric",))
]


@pytest.mark.parametrize(("name", "ratio_type"), RATIOS)
@pytest.mark.parametrize("correction", [None, CORRECTED], ids=["plain", "corrected"])
def test_turns_have_the_same_loss_in_contexts_of_their_own(name, ratio_type, correction):
    """As long as ratios are of tokens or turns and every token weighs the same, contexts are only a way to
    store turns."""
    keys = {
        "pg_variant": name,
        "loss_agg_mode": "token-mean",
        "ratio_type": ratio_type,
        "train_infer_correction": correction,
    }
    if name.endswith("_cov"):
        keys["pg_args"] = {"fraction": 0.3} | ({"covariance_low": 0.0} if name == "clip_cov" else {})
    (whole, gradient), (split, split_gradient) = (
        stepped(mode, np.random.default_rng(0), **keys) for mode in (False, True)
    )
    assert split == pytest.approx(whole, abs=1e-6) and whole != 0.0
    torch.testing.assert_close(split_gradient, gradient)
