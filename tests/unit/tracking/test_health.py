"""Each condition is found in a series that has it, once, and in none of the series of good runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from turnwise.tracking.conditions import CONDITIONS, PAGE, random_condition
from turnwise.tracking.health import Health, Outcomes
from turnwise.types import Group, Task, Trajectory, Turn

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "data" / "health"
RNG = np.random.default_rng(0)
GOOD = {
    "rollout/score/mean": 0.5,
    "rollout/score/min": 0.0,
    "rollout/score/max": 1.0,
    "rollout/parsed": 1.0,
    "rollout/response_length/mean": 20.0,
    "rollout/length_limited": 0.0,
    "critic/advantages/min": -1.0,
    "critic/advantages/max": 1.0,
    "actor/entropy": 0.5,
    "actor/backward_steps": 1.0,
    "actor/skipped_steps": 0.0,
    "actor/updates_left_out": 0.0,
    "actor_train/grad_norm": 0.3,
    "actor/train_infer_diff_token_mean": 1e-6,
    "actor/train_infer_ess": 1.0,
    "env/A/action_is_valid": 1.0,
}
ALIKE = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0, "actor_train/grad_norm": 0.0}


def told(rows, groups=(), **options):
    """The sentences after each step, by condition."""
    health = Health(**options)
    return [health.see(step, row, groups) for step, row in enumerate(rows)]


def said(rows, **options):
    """`{condition: step in which it was said}`; every sentence is said once."""
    found = {}
    for step, sentences in enumerate(told(rows, **options)):
        assert not found.keys() & sentences
        found |= dict.fromkeys(sentences, step)
    return found


def run_of(*parts):
    """Rows with a noisy success; a part is `(steps, success at its start, success at its end, other
    values)`."""
    rows = []
    for steps, first, last, changes in parts:
        for success in np.linspace(first, last, steps):
            noisy = float(np.clip(success + RNG.normal(scale=0.04), 0, 1))
            rows.append({**GOOD, "env/A/success": noisy, **changes})
    return rows


RISING = (20, 0.3, 0.6, {})
START = {"env/A/success": 0.234, "system/samples": 128.0, "env/A/action_is_valid": 0.997, "actor/lr": 1e-2}
BROKEN = {
    **GOOD,
    **START,
    "env/A/success": 0.0,
    "env/A/action_is_valid": 0.098,
    **ALIKE,
    "rollout/length_limited": 0.7,
}
CASES = {
    "broken_start": ([{**GOOD, **START}, BROKEN, BROKEN], 1),
    "groups_alike": (run_of((3, 0.5, 0.5, {**ALIKE, "actor/updates_left_out": 1.0})), 2),
    "answers_unparsable": (run_of(RISING, (2, 0.5, 0.5, {"rollout/parsed": 0.05})), 21),
    "entropy_collapsed": (run_of(RISING, (6, 0.6, 0.6, {"actor/entropy": 0.001})), 24),
    "gradient": (run_of(RISING, (3, 0.6, 0.6, {"actor_train/grad_norm": 0.0})), 22),
    "log_probs_drift": (run_of(RISING, (5, 0.6, 0.6, {"actor/train_infer_diff_token_mean": 0.2})), 24),
    "responses_cut": (run_of(RISING, (5, 0.6, 0.6, {"rollout/length_limited": 0.7})), 24),
    "entropy_blown_up": (run_of(RISING, (5, 0.6, 0.6, {"actor/entropy": 2.0})), 24),
}


@pytest.mark.parametrize("name", CASES)
def test_a_condition_is_said_once_when_its_steps_are_full(name):
    rows, step = CASES[name]
    assert said(rows + rows[-3:]) == {name: step}


def test_a_run_that_its_first_update_broke_is_told_why_and_nothing_else():
    rows = [{**GOOD, **START, "actor/log_prob_change": 3.2}, *[{**BROKEN, "rollout/parsed": 0.05}] * 30]
    sentences = told(rows, play_at_random=lambda: Outcomes(0.3, 200))
    assert [name for step in sentences for name in step] == ["broken_start"]
    sentence = sentences[1]["broken_start"]
    for word in (
        "learning rate 0.01",
        "3.2 nats",
        "0.23 to 0.00",
        "1.00 to 0.05",
        "smaller learning rate",
        "model before",
    ):
        assert word in sentence


@pytest.mark.parametrize(
    ("first", "later", "is_told"),
    [
        ({}, {"env/A/success": 0.2}, False),
        ({"env/A/success": 0.6}, {"env/A/success": 0.3}, True),
        ({"env/A/success": 0.6, "system/samples": 8.0}, {"env/A/success": 0.4, "system/samples": 8.0}, False),
        ({"env/A/success": 0.6, "actor/log_prob_change": 0.01}, {"env/A/success": 0.3}, False),
        ({"env/A/success": 0.0}, {"env/A/success": 0.0, "env/A/action_is_valid": 0.1}, True),
        ({"actor/backward_steps": 0.0, "env/A/success": 0.9}, {"env/A/success": 0.1}, False),
    ],
)
def test_a_fall_counts_if_it_is_beyond_chance_and_an_update_can_have_caused_it(first, later, is_told):
    rows = [{**GOOD, **START, **first}, {**GOOD, **START, **later}]
    assert ("broken_start" in said(rows)) is is_told


def test_scores_of_rows_stand_for_a_success_that_is_not_measured():
    rows = [{**GOOD, "system/samples": 128.0, "rollout/score/mean": mean} for mean in (0.8, 0.0)]
    assert said(rows) == {"broken_start": 1}


def test_siblings_of_few_groups_are_not_independent_episodes():
    task = Task(id="t", tag="A", split="train", seed=0)
    rows = [{**GOOD, "env/A/success": share, "system/samples": 64.0} for share in (0.5, 0.25)]

    def groups(*shares):
        return [
            Group(task, [Trajectory(task, n, metrics={"success": share}) for n in range(16)])
            for share in shares
        ]

    health = Health()
    health.see(0, rows[0], groups(1.0, 1.0, 0.0, 0.0))
    assert health.see(1, rows[1], groups(1.0, 0.0, 0.0, 0.0)) == {}
    assert said(rows) == {"broken_start": 1}


def test_advice_names_the_key_of_the_kind_of_task():
    rows, step = CASES["responses_cut"]
    assert "max_tokens_per_step" in told(rows)[step]["responses_cut"]
    sentence = told(rows, length_key="actor_infer.generating_args.max_new_tokens")[step]["responses_cut"]
    assert "actor_infer.generating_args.max_new_tokens" in sentence and "max_tokens_per_step" not in sentence


def test_the_answers_that_an_environment_calls_invalid_count_as_unparsable():
    assert said(run_of(RISING, (2, 0.5, 0.5, {"env/A/action_is_valid": 0.02}))) == {"answers_unparsable": 21}


def test_an_entropy_bonus_that_wins_is_told_long_before_the_policy_is_noise():
    """0.14 nats at step 30, 5.9 at step 60, as the quickstart with four times its bonus."""
    rows = run_of((30, 0.3, 0.8, {}), (30, 0.8, 0.0, {}), (20, 0.0, 0.0, {}))
    for row, entropy in zip(
        rows, [*np.linspace(0.4, 0.14, 30), *np.linspace(0.14, 5.9, 30), *[5.9] * 20], strict=True
    ):
        row["actor/entropy"] = float(entropy)
    found = said(rows)
    assert 33 <= found["entropy_blown_up"] <= 41 and set(found) == {"entropy_blown_up", "success_lost"}


def test_a_format_that_was_known_is_told_from_one_that_never_was():
    bad = run_of((2, 0.0, 0.0, {"rollout/parsed": 0.0}))
    assert "an update broke them" in told(run_of(RISING) + bad)[-1]["answers_unparsable"]
    assert "broke" not in told(bad)[-1]["answers_unparsable"]


def test_no_gradient_was_finite():
    rows = run_of(RISING, (3, 0.6, 0.6, {"actor/skipped_steps": 1.0}))
    for row in rows[-3:]:
        del row["actor_train/grad_norm"]
    assert said(rows) == {"gradient": 22}


def test_a_filter_that_leaves_nothing_is_no_advantage_either():
    empty = {"rollout/filtered": 16.0, "rollout/unfiltered_score/mean": 0.0, "actor/backward_steps": 0.0}
    assert said([empty] * 3) == {"groups_alike": 2}


def test_a_critic_has_nothing_to_teach_where_all_episodes_score_alike():
    values = {"critic/values/mean": 0.1}
    assert said(run_of((5, 0.3, 0.3, values))) == {}
    assert said(run_of((5, 0.3, 0.3, {**values, "rollout/score/max": 0.0}))) == {"groups_alike": 2}


def test_groups_that_have_differed_may_be_alike_by_chance():
    assert said(run_of(RISING, (9, 0.6, 0.6, ALIKE), (5, 0.6, 0.6, {}))) == {}
    assert said(run_of(RISING, (10, 0.6, 0.6, ALIKE))) == {"groups_alike": 29}


def test_a_solved_run_may_be_certain():
    changes = {**ALIKE, "actor/entropy": 1e-4, "rollout/length_limited": 1.0}
    assert said([{**GOOD, "env/A/success": 0.99, **changes}] * 9) == {}


def test_success_lost_against_the_best():
    found = said(run_of((30, 0.3, 0.8, {}), (15, 0.8, 0.3, {}), (10, 0.3, 0.3, {})))
    assert set(found) == {"success_lost"} and 35 <= found["success_lost"] <= 46


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_noise_around_a_level_is_no_loss(level):
    for seed in range(10):
        success = np.random.default_rng(seed).binomial(32, level, size=300) / 32
        assert (
            said([{**GOOD, "env/A/success": float(share)} for share in success], play_at_random=lambda: None)
            == {}
        )


def validated(first, last):
    rows = run_of((60, 0.3, 0.9, {}))
    for number, share in enumerate(np.linspace(first, last, 6)):
        rows[10 * number] |= {"val/env/A/success": float(share), "val/num_episodes": 256.0}
    return rows


def test_validation_falls_while_training_rises():
    rows = validated(0.6, 0.6)
    for step, share in ((30, 0.5), (40, 0.42), (50, 0.4)):
        rows[step]["val/env/A/success"] = share
    assert said(rows) == {"validation_falls": 40}
    assert said(validated(0.3, 0.8)) == {}
    one_bad = validated(0.5, 0.7)
    one_bad[40]["val/env/A/success"] = 0.3
    assert said(one_bad) == {}
    assert said(validated(2.0, 2.0)) == {}, "a success that is a count has no error of a share"


def test_a_success_that_a_random_player_has_too():
    asked = []

    def play(success):
        def count():
            asked.append(success)
            return Outcomes(success, 200)

        return count

    flat = [{**GOOD, "env/A/success": 0.3}] * 40
    assert said(flat, play_at_random=play(0.3)) == {"no_better_than_random": 19}
    assert said(flat, play_at_random=play(0.1)) == {}
    assert asked == [0.3, 0.1], "asked once per run"
    assert said(run_of((40, 0.1, 0.9, {})), play_at_random=play(0.9)) == {}
    assert asked == [0.3, 0.1], "not where success rises"
    assert said(flat, play_at_random=lambda: None) == {}


def test_the_random_players_success_is_measured_once_in_the_step_in_which_it_played():
    health, measured = Health(lambda: Outcomes(0.25, 200)), {}
    for step in range(40):
        health.see(step, {**GOOD, "env/A/success": 0.3})
        measured[step] = health.measured()
    assert {step: metrics for step, metrics in measured.items() if metrics} == {
        19: {"random_player/success": 0.25}
    }


def test_a_run_that_takes_off_late_is_told_only_what_is_so_by_then():
    rows = [
        {**GOOD, "env/A/success": share} for share in [0.3] * 40 + [0.3 + 0.02 * step for step in range(30)]
    ]
    [sentence] = [
        text for texts in told(rows, play_at_random=lambda: Outcomes(0.3, 200)) for text in texts.values()
    ]
    assert "after step 20: so far success hasn't risen: it is 0.30 after 20 steps" in sentence
    assert "it may rise yet" in sentence


def test_a_run_that_learns_slowly_from_a_random_players_success_is_seldom_accused():
    """Binomial successes of 64 episodes. A rise must be ruled out, not only be lost in the noise."""

    def share(last):
        accused = 0
        for seed in range(40):
            rng = np.random.default_rng(seed)
            rows = [
                {**GOOD, "env/A/success": rng.binomial(64, level) / 64}
                for level in np.linspace(0.14, last, 60)
            ]
            random = Outcomes(rng.binomial(200, 0.14) / 200, 200)
            accused += "no_better_than_random" in said(rows, play_at_random=lambda random=random: random)
        return accused / 40

    assert share(0.14) > 0.9 and share(0.3) < 0.2


def test_what_a_run_has_said_is_not_said_after_it_goes_on():
    rows, step = CASES["entropy_blown_up"]
    health = Health()
    health.restore([*rows[:-1], {**rows[-1], "health/entropy_blown_up": 1.0}])
    assert health.see(step + 1, rows[-1]) == {}
    goes_on = Health()
    goes_on.restore(rows[:-1])
    assert list(goes_on.see(step, rows[-1])) == ["entropy_blown_up"], "the steps before count"


def test_one_unparsable_answer_is_shown_and_cut():
    turns = [
        Turn(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.float32), text=text, action=action)
        for text, action in (("fine", "Up"), ("no " * 60, None))
    ]
    task = Task(id="t", tag="A", split="train", seed=0)
    groups = [Group(task, [Trajectory(task, 0, turns=turns)])]
    rows, _ = CASES["answers_unparsable"]
    quoted = re.search(r"one of them: '((?:no )+.*)'…", told(rows, groups)[-1]["answers_unparsable"])
    assert quoted is not None and len(quoted.group(1)) == 80


def test_every_sentence_names_a_heading_of_the_page_with_what_to_do():
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / PAGE).read_text(encoding="utf-8"))
    conditions = (*CONDITIONS, random_condition(lambda: None))
    named = [condition.heading for condition in conditions]
    assert headings == [heading for heading in headings if heading in named] + ["None of these"]
    assert sorted(headings[:-1]) == sorted(named)
    for name, (rows, step) in CASES.items():
        text = told(rows)[step][name]
        assert re.search(rf'^after step {step + 1}: .*\. .*\. See {re.escape(PAGE)}, "(.+)"$', text), text


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")), ids=lambda file: file.stem)
def test_recorded_runs(file):
    """Real runs of the examples, reduced to what is looked at: `expected` says what, and between which steps.
    `random` is the success of a random player, where it was measured, and its episodes. Sokoban with PPO
    began from a tenth of the recipe's demonstrations, and its model played as the random player does; sokoban
    began there too, and learnt."""
    recorded = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        {name: value for name, value in zip(recorded["names"], row, strict=True) if value is not None}
        for row in recorded["rows"]
    ]
    random = Outcomes(*recorded["random"]) if "random" in recorded else None
    found = said(rows, play_at_random=lambda: random)
    assert set(found) == set(recorded["expected"])
    for name, (first, last) in recorded["expected"].items():
        assert first <= found[name] <= last
