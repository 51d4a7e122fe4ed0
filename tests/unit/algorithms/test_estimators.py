"""What each estimator is: worked numbers, edges, settings, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import TASK, build, episode

from turnwise.algorithms.estimator import Estimator
from turnwise.algorithms.score_estimator import GRPOPassK, ScoreEstimator, TrajectoryScores, run_index
from turnwise.algorithms.settings import AlgorithmSettings, RewardNormalization
from turnwise.algorithms.step_estimator import GiGPO, StepEstimator
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.errors import ConfigError, EnvironmentFault
from turnwise.spec import ESTIMATORS
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Group, samples_of

MEAN = RewardNormalization(method="mean")


def by_turn(trajectory):
    """The advantage of each turn, having checked that its tokens share it."""
    found = {}
    for sample in trajectory.samples:
        for span in sample.turn_spans:
            values = set(sample.advantages[span.start : span.stop].tolist())
            assert len(values) == 1
            found[span.turn] = values.pop()
    return [found[turn] for turn in sorted(found)]


def flat(lists):
    return [x for of_list in lists for x in of_list]


def credited(name, groups, **settings):
    """The advantages of the turns of each trajectory, and the metrics."""
    metrics = reduce_metrics(build(name, **settings).credit(groups))
    return [by_turn(trajectory) for group in groups for trajectory in group.trajectories], metrics


def score_groups(*scores):
    return [
        Group(TASK, [episode([score], sibling=i) for i, score in enumerate(of_group)], index=g)
        for g, of_group in enumerate(scores)
    ]


# ------------------------------------------------------------------------------------------------
# worked numbers


@pytest.mark.parametrize(
    ("name", "episodes", "plain"),
    [
        ("reinforce_plus_plus", [([1.0, 0.0], [2, 2]), ([0.0], [2])], [0.125, 0.25, 0.5, 1, 0, 0]),
        ("reinforce_plus_plus_baseline", [([2.0], [3]), ([0.0], [1])], [1, 1, 1, -1]),
    ],
)
def test_reinforce_plus_plus_whitens_over_tokens(name, episodes, plain):
    """Returns of the score, or scores centred by their group."""
    trajectories = [
        episode(rewards, lengths=lengths, sibling=i) for i, (rewards, lengths) in enumerate(episodes)
    ]
    build(name, gamma=0.5).credit([Group(TASK, trajectories)])
    got = np.concatenate([s.advantages[s.response_mask] for t in trajectories for s in t.samples])
    np.testing.assert_allclose(
        got, (plain - np.mean(plain)) / np.sqrt(np.var(plain, ddof=1) + 1e-8), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("rloo", score_groups([1, 0, 0, 1], [7]), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0]),
        (
            "opo",
            [Group(TASK, [episode([1.0], lengths=[1]), episode([0.0], lengths=[3], sibling=1)])],
            [0.75, -0.25],
        ),
        ("grpo_passk", score_groups([1.0, 0.5, 0.0], [1.0, 1.0, 0.0]), [1, 0, 0, 0, 0, 0]),
        ("gpg", score_groups([1, 0], [1, 1], [0.3, 0.1 + 0.2]), [1.5, -1.5, 0, 0, 0, 0]),
        (
            "remax",
            [Group(TASK, [episode([3.0]), episode([1.0], sibling=1)], greedy=episode([0.5, 1.5]))],
            [1, -1],
        ),
    ],
)
def test_estimators_on_scores(name, groups, expected):
    """The mean of the others; the mean by trained tokens; the best alone, above the second; groups that teach
    nothing made up for; the greedy score subtracted."""
    assert flat(credited(name, groups)[0]) == pytest.approx(expected, abs=1e-5)


def test_step_reinforce_normalises_step_returns():
    groups = [Group(TASK, [episode([0, 0, 1]), episode([0], sibling=1)])]
    got, metrics = credited("step_reinforce", groups, step_reward_gamma=0.5)
    returns = np.array([0.25, 0.5, 1.0, 0.0])
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    assert flat(got) == pytest.approx(expected.tolist(), abs=1e-6)
    assert metrics["critic/step_rewards/max"] == pytest.approx(expected.max())
    identity = RewardNormalization(method="identity")
    assert credited("step_reinforce", groups, step_reward_gamma=0.5, reward_normalization=identity)[0] == [
        [0.25, 0.5, 1],
        [0],
    ]


def gigpo_example():
    rewards, states = ([0, 0, 1], [0, -0.1], [0]), ["s0", "s1", "s2"]
    return Group(
        TASK,
        [episode(of_one, states[: len(of_one)], sibling=sibling) for sibling, of_one in enumerate(rewards)],
    )


def test_gigpo():
    group = gigpo_example()
    steps, metrics = credited("gigpo", [group], reward_normalization=MEAN, episode_reward_weight=0.0)
    assert flat(steps) == pytest.approx([0.633333, 0.525, 0, -0.364167, -0.525, -0.269167], abs=1e-6)
    episodes, _ = credited("gigpo", [group], reward_normalization=MEAN, step_reward_weight=0.0)
    assert flat(episodes) == pytest.approx([0.7, 0.7, 0.7, -0.4, -0.4, -0.3], abs=1e-6)
    assert (metrics["critic/bucket_size/mean"], metrics["critic/bucket_size/max"]) == (2.0, 3.0)
    assert metrics["critic/bucket_of_one"] == pytest.approx(1 / 3) and metrics["critic/aliased_turns"] == 0.0


# ------------------------------------------------------------------------------------------------
# edges


@pytest.mark.parametrize(
    "name", [name for name, spec in ESTIMATORS.items() if spec.compares_siblings and name != "grpo_passk"]
)
def test_a_group_of_one_turn_teaches_nothing(name):
    assert credited(name, score_groups([7.0], [7.0]))[0] == [[0.0], [0.0]]


def test_a_group_of_one_is_refused_by_grpo_passk():
    with pytest.raises(ConfigError, match="group of 1 has none"):
        credited("grpo_passk", score_groups([1.0, 0.0], [1.0]))


def test_trajectories_of_a_run_share_its_number_and_others_do_not():
    parts = [episode([0.0], weight=0.5), episode([0.0], weight=0.5), episode([0.0], sibling=1, weight=0.5)]
    assert run_index([Group(TASK, parts), Group(TASK, [episode([0.0]), episode([0.0])])]).tolist() == [
        0,
        0,
        1,
        2,
        3,
    ]


def best_above_second(scores, groups, weights, runs):
    return GRPOPassK(AlgorithmSettings()).transform(
        TrajectoryScores(scores, groups, weights, np.ones(len(scores)), runs)
    )


def test_a_run_that_weighs_nothing_is_neither_best_nor_second():
    scores, groups, runs = np.array([-1.0, -2.0, -4.0, 9.0]), np.zeros(4, int), np.arange(4)
    got = best_above_second(scores, groups, np.array([1.0, 1, 1, 0]), runs)
    assert got == pytest.approx([1 / (np.std([-1.0, -2.0, -4.0], ddof=1) + 1e-6), 0, 0, 0])
    assert best_above_second(scores, groups, np.array([1.0, 0, 0, 0]), runs).tolist() == [0, 0, 0, 0]


def test_the_best_of_a_group_whose_spread_is_unknown_is_not_blown_up():
    got = best_above_second(np.array([1.0, 0.0]), np.zeros(2, int), np.array([0.5, 0.5]), np.arange(2))
    assert got.tolist() == [0, 0]


def test_gpg_counts_groups_without_variance_and_not_scores_at_the_mean():
    # B = 5 and M = 2: the score at the mean of its group is not counted out, which would give 5/2.
    assert flat(credited("gpg", score_groups([0, 0.5, 1], [1, 1]))[0]) == pytest.approx(
        [-5 / 6, 0, 5 / 6, 0, 0]
    )
    assert credited("gpg", score_groups([1, 1]))[0] == [[0], [0]]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("grpo", "mean"),
        *(
            (name, None)
            for name in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_passk")
        ),
    ],
)
def test_scores_that_differ_by_rounding_have_no_advantage(name, method):
    asked = {"reward_normalization": RewardNormalization(method=method)}
    assert not any(
        flat(credited(name, score_groups([0.6, 0.1 + 0.2 + 0.3, 0.6], [0.1, 0.1, 0.1]), **asked)[0])
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_batches_with_nothing_to_train_are_credited_zeros(name):
    trajectories = [episode([1.0, 0.0], lengths=[0, 0], sibling=i) for i in range(2)]
    for trajectory in trajectories:
        for sample in trajectory.samples:
            sample.values = sample.next_values = np.zeros(sample.num_tokens, np.float32)
    groups = [Group(TASK, trajectories, greedy=episode([1.0]))]
    clips = {"whiten_advantages": True, "reward_clip": 1.0, "advantage_clip": 1.0}
    metrics = reduce_metrics(build(name, **clips).credit(groups))
    assert all(not sample.advantages.any() for sample in samples_of(groups))
    assert metrics["critic/score/mean"] == 1.0 and np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_kl_is_not_measured_from_zeros(name, make_nested):
    groups = make_nested(0, smallest=2)
    for sample in samples_of(groups):
        sample.ref_logprobs = None
    assert not any(metric.name.startswith("critic/kl") for metric in build(name).credit(groups))


def test_remax_without_a_greedy_sibling_says_whose_it_is():
    with pytest.raises(ValueError, match=r"group 0 \(task t\) has none"):
        credited("remax", score_groups([1.0]))


# ------------------------------------------------------------------------------------------------
# gigpo


def test_a_turn_without_a_state_is_refused_by_gigpo():
    with pytest.raises(EnvironmentFault, match=r"no state_key .*'None'"):
        credited("gigpo", [Group(TASK, [episode([1.0], [None]), episode([0.0], ["s"])])])


def test_observations_that_hide_states_are_counted():
    group = gigpo_example()
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            turn.observation = "a room" if turn.state_key in ("s1", "s2") else "the door"
    other = Group(TASK, [episode([0.0], ["s9"])])
    other.trajectories[0].turns[0].observation = "the door"
    assert credited("gigpo", [group, other])[1]["critic/aliased_turns"] == pytest.approx(3 / 7)


def test_gigpo_keeps_statistics_of_episodes_and_of_steps_apart():
    running = RewardNormalization(norm_mean_type="running", norm_std_type="running")
    first, second = (build("gigpo", reward_normalization=running) for _ in range(2))
    first.credit([gigpo_example()])
    state = first.running.state_dict()
    assert (state["episode"]["count"], state["step"]["count"]) == (3.0, 6.0)
    second.running.load_state_dict(state)
    found = []
    for algorithm in (first, second):
        group = gigpo_example()
        algorithm.credit([group])
        found.append([by_turn(t) for t in group.trajectories])
    assert found[0] == found[1]
    assert build("gigpo").running is None


# ------------------------------------------------------------------------------------------------
# settings


@pytest.mark.parametrize("name", [name for name, spec in ESTIMATORS.items() if spec.normalization == "own"])
@pytest.mark.parametrize("asked", [{"method": "mean"}, {"grouping": "batch"}, {"norm_std_type": "batch"}])
def test_estimators_that_centre_in_their_own_way_refuse_another(name, asked):
    with pytest.raises(ConfigError, match="remove reward_normalization"):
        build(name, reward_normalization=RewardNormalization(**asked))


@pytest.mark.parametrize("name", ["gae", "reinforce", "agentic_reinforce"])
def test_single_turn_rewards_are_not_normalised(name):
    with pytest.raises(ConfigError, match=f"{name} works on single turn rewards.*reward_placement final"):
        build(name, reward_normalization=RewardNormalization(method="mean_std"))
    build(name, reward_normalization=RewardNormalization(method="mean_std"), reward_placement="final")


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
@pytest.mark.parametrize("asked", [{"method": "identity"}, {"norm_mean_type": "none"}])
def test_a_comparison_without_a_mean_is_refused(name, asked):
    with pytest.raises(ConfigError, match=f"{name} compares siblings with their mean.*mean_std"):
        build(name, reward_normalization=RewardNormalization(**asked))


# ------------------------------------------------------------------------------------------------
# the bundle


@pytest.mark.parametrize(("name", "spec"), ESTIMATORS.items(), ids=ESTIMATORS)
def test_spec_names_the_class_and_the_class_reads_spec(name, spec):
    algorithm = build(name, use_kl_loss=True)
    assert isinstance(algorithm, Estimator) and algorithm.spec is spec
    assert algorithm.needs == spec.needs | {"ref_logprobs"}
    assert (algorithm.value_loss is None) == ("values" not in spec.needs)
    kind = (TokenEstimator if spec.reward_placement != "score" else ScoreEstimator, StepEstimator)[
        spec.has_step_returns
    ]
    assert isinstance(algorithm, kind)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_credit_twice_gives_the_same(name, make_nested):
    groups = make_nested(1, smallest=2)
    algorithm = build(name, add_token_level_kl=True, init_kl_coef=0.3)
    algorithm.credit(groups)
    first = [sample.advantages.copy() for sample in samples_of(groups)]
    algorithm.credit(groups)
    assert all((a == sample.advantages).all() for a, sample in zip(first, samples_of(groups), strict=True))


def test_a_user_s_own_estimator_inherits_an_order_and_its_own_defaults():
    class Rank(ScoreEstimator):
        def transform(self, outcomes):
            return outcomes.scores.argsort().argsort() - (len(outcomes.scores) - 1) / 2

    settings = AlgorithmSettings(adv_estimator="mine:Rank", reward_clip=0.75)
    groups = score_groups([5.0, -3.0, 0.5])
    metrics = reduce_metrics(Rank(settings).credit(groups))
    assert [by_turn(t) for t in groups[0].trajectories] == [[0.75], [-0.75], [0.0]]
    assert metrics["critic/reward_clip_frac"] == pytest.approx(2 / 3)

    class Last(GiGPO):
        """A subclass of a built-in one keeps its defaults."""

    assert Last(AlgorithmSettings(adv_estimator="mine:Last")).normalizer.method == "mean_std"


def test_a_user_s_own_estimator_on_steps_may_normalise_them():
    """Step returns can be normalised wherever rewards stand, whatever its `spec` say of it."""

    class Plain(StepEstimator):
        def compare(self, groups, tokens, returns):
            return self.normalizer(returns, tokens.trajectory_of_turn), []

    settings = AlgorithmSettings(adv_estimator="mine:Plain", step_reward_gamma=1.0, reward_normalization=MEAN)
    group = Group(TASK, [episode([1.0, 2.0]), episode([4.0, 0.0, 0.0])])
    Plain(settings).credit([group])
    assert [by_turn(t) for t in group.trajectories] == [
        [0.5, -0.5],
        [pytest.approx(8 / 3), *[pytest.approx(-4 / 3)] * 2],
    ]
