"""Questions of reasoning-gym: asked by seed, scored by the package, and refused where that isn't safe or
repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from messages import says
from reasoning_gym.factory import DATASETS

from turnwise.envs.reasoning_gym_env import NUM_TASKS, RUNS_ANSWERS, UNREPEATABLE, ReasoningGymEnv
from turnwise.errors import EnvironmentFault
from turnwise.testing.env_contract import check_env_contract


def answer_to(question: str) -> str:
    """The sum in a question of chain_sum."""
    terms = question.partition(": ")[2].removesuffix(" =").split()
    signs = [1, *(1 if sign == "+" else -1 for sign in terms[1::2])]
    return str(sum(sign * int(term) for sign, term in zip(signs, terms[::2], strict=True)))


def test_a_right_answer_is_worth_one() -> None:
    env = ReasoningGymEnv("chain_sum")
    for seed in range(20):
        question, info = env.reset(seed=seed)
        assert info["env_instruction"] == "Answer the question."
        observation, reward, terminated, truncated, told = env.step(answer_to(question))
        assert (observation, reward, terminated, truncated) == ("That is right.", 1.0, True, False)
        assert told["metrics"] == {
            "success": 1.0,
            "best_score": 1.0,
            "action_is_valid": 1.0,
            "format_penalty": 0.0,
        }


def test_rewards_of_the_attempts_add_up_to_the_best_score() -> None:
    env = ReasoningGymEnv("palindrome_generation", num_attempts=4)
    env.reset(seed=1)
    steps = [env.step(word) for word in ("abc", "", "zzz", "abc")]
    best = [step[4]["metrics"]["best_score"] for step in steps]
    assert best == sorted(best) and 0.0 < best[-1] < 1.0
    assert sum(step[1] for step in steps) == pytest.approx(best[-1])
    assert [step[2] for step in steps] == [False, False, False, True]
    assert steps[1][0] == "That is not right. Attempts left: 2."


def test_an_answer_that_could_not_be_parsed_is_an_attempt_and_costs() -> None:
    env = ReasoningGymEnv("chain_sum", num_attempts=2, format_penalty=-0.2)
    question, _ = env.reset(seed=2)
    _, reward, is_over, _, info = env.step("")
    assert (reward, is_over, info["metrics"]["action_is_valid"]) == (-0.2, False, 0.0)
    assert info["metrics"]["format_penalty"] == -0.2
    assert env.step(answer_to(question))[1:3] == (1.0, True)


def test_an_answer_that_breaks_the_scorer_scores_nothing() -> None:
    env = ReasoningGymEnv("prime_factorization")
    env.reset(seed=0)
    assert env.step("two times two")[1:3] == (0.0, True)


def test_training_and_validation_ask_different_questions() -> None:
    def questions(split: Any) -> set[str]:
        env = ReasoningGymEnv("coin_flip", {"min_trials": 2, "max_trials": 5}, split=split)
        return {env.reset(seed=seed)[0] for seed in range(300)}

    held_out = questions("val")
    assert len(held_out) >= 3 and not held_out & questions("train")
    everything = ReasoningGymEnv("coin_flip", {"size": 1}, split=None)
    assert len({everything.reset(seed=seed)[0] for seed in range(5)}) == 1
    single = [ReasoningGymEnv("coin_flip", {"size": 1}, split=split) for split in ("train", "val")]
    assert len({env.reset(seed=0)[0] for env in single}) == 1 and sum(env.plays_all for env in single) == 1


def test_a_state_is_a_question_and_how_often_it_was_answered() -> None:
    env = ReasoningGymEnv("chain_sum", num_attempts=3)
    keys = []
    for seed in (1, 2):
        env.reset(seed=seed)
        keys += [env.state_key(), env.step("x") and env.state_key()]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": "chain_sum", "num_attempts": 2},
        {"dataset": "tower_of_hanoi", "split": "val"},
        {"dataset": "propositional_logic", "split": "train"},
        {"dataset": "string_insertion", "runs_answers": True},
        {"dataset": "mini_sudoku", "dataset_config": {"seed": 7}},
    ],
)
def test_datasets_pass_the_contract(arguments: dict[str, Any]) -> None:
    check_env_contract(lambda: ReasoningGymEnv(**arguments), ["4", "[1, 2]"], seeds=(0, 2**62))


def test_the_lists_are_of_this_version() -> None:
    assert set(DATASETS) >= RUNS_ANSWERS | UNREPEATABLE and NUM_TASKS > 10_000


def test_no_answer_is_run_unless_that_was_asked_for(tmp_path: Path) -> None:
    attack = f"__import__('pathlib').Path({str(tmp_path / 'run')!r}).write_text('x')"
    for dataset in sorted(set(DATASETS) - UNREPEATABLE - {"composite"}):
        if dataset in RUNS_ANSWERS:
            with pytest.raises(EnvironmentFault, match=says("runs_answers: true", "Python")):
                ReasoningGymEnv(dataset)
    env = ReasoningGymEnv("string_insertion", runs_answers=True)
    env.reset(seed=0)
    env.step(attack)
    assert (tmp_path / "run").exists(), "the scorer is safe now: take the dataset off RUNS_ANSWERS"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chain_sums"}, "no dataset 'chain_sums'; it has ab, .*Did you mean 'chain_sum'"),
        ({"dataset_config": {"min_terms": 0}}, says("dataset_config", "min_terms", "chain_sum")),
        (
            {"dataset_config": {"terms": 3}},
            says("dataset_config", "'terms'", "chain_sum"),
        ),
        ({"dataset": "composite"}, says("dataset", "composite", "environment tag")),
        ({"dataset": "ransom_note"}, says("ransom_note", "seed")),
        ({"dataset_config": {"seed": None}}, says("reasoning_gym", "dataset_config.seed")),
        ({"dataset_config": 5}, says("reasoning_gym", "dataset_config", "5")),
        ({"dataset": 5}, says("reasoning_gym", "dataset", "5")),
        ({"dataset": "n_queens", "runs_answers": "no"}, says("reasoning_gym", "runs_answers", "'no'")),
        ({"num_attempts": 0}, says("reasoning_gym", "num_attempts", "0", "1")),
        ({"num_attempts": 1.5}, says("reasoning_gym", "num_attempts", "1.5", "1")),
    ],
)
def test_what_a_config_gets_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        ReasoningGymEnv(**{"dataset": "chain_sum", **arguments})
