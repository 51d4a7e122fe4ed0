"""Retry: two attempts, and a message between them that doesn't tell the answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from messages import says

from turnwise.envs.retry import NEUTRAL, RetryEnv
from turnwise.errors import EnvironmentFault
from turnwise.testing.env_contract import check_env_contract


def started(seed: int = 4, **options: Any) -> RetryEnv:
    env = RetryEnv(**options)
    env.reset(seed=seed)
    return env


def test_a_right_first_answer_ends_the_episode() -> None:
    env = started()
    observation, reward, is_over, _, info = env.step(f" {env.solution} ")
    assert (reward, is_over) == (1.0, True) and "right" in observation
    assert info["metrics"]["first_right"] == info["metrics"]["success"] == 1.0
    assert "repaired" not in info["metrics"]
    assert env.step(env.solution)[1:3] == (0.0, True), "it is rewarded once"


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_second_answer_is_the_last_one(is_repaired: bool) -> None:
    env = started(second_reward=0.25)
    env.step("0")
    answer = env.solution if is_repaired else "0"
    _, reward, is_over, _, info = env.step(answer)
    assert (reward, is_over) == (0.25 * is_repaired, True)
    assert info["metrics"]["repaired"] == info["metrics"]["success"] == float(is_repaired)
    assert info["metrics"]["first_right"] == 0.0


def test_the_message_names_the_fault_and_never_the_answer() -> None:
    env = started()  # 50 + 97 = 147
    assert mentions_of(env, "149") == "1 right\n4 right\n9 high"
    assert mentions_of(env, "037") == "0 low\n3 low\n7 right"
    assert mentions_of(env, "14") == "Too few digits"
    assert mentions_of(env, "1470") == "Too many digits"
    for seed in range(60):
        env = started(seed)
        answer = str(int(env.solution) + random.Random(seed).choice([-20, -1, 1, 30]))
        if answer.isdigit():
            assert env.solution not in env.step(answer)[0]


def mentions_of(env: RetryEnv, answer: str) -> str:
    env.reset(seed=4)
    return env.step(answer)[0].removesuffix("Answer again.").strip(" .\n")


def test_the_control_says_the_same_of_every_wrong_answer() -> None:
    for answer in ("149", "14", "word", ""):
        assert started(message="neutral").step(answer)[0] == NEUTRAL


@pytest.mark.parametrize("answer", ["", "word", "-3", "1.0", "²", "1234567890", "12 3"])
def test_what_is_no_number_costs_the_penalty_and_an_attempt(answer: str) -> None:
    env = started(format_penalty=-0.5)
    observation, reward, is_over, _, info = env.step(answer)
    assert (observation, reward, is_over) == (NEUTRAL, -0.5, False)
    assert info["metrics"]["action_is_valid"] == 0.0


def test_sums_of_validation_are_not_those_of_training_in_any_order() -> None:
    def pairs(split: Any) -> set[frozenset[str]]:
        env = RetryEnv(num_digits=1, split=split)
        return {frozenset(env.reset(seed=seed)[0].strip("=").split("+")) for seed in range(400)}

    assert not pairs("train") & pairs("val")


def test_random_answers_have_one_wrong_digit() -> None:
    env = started(num_digits=2)
    rng = random.Random(0)
    for seed in range(300):
        env.reset(seed=seed)
        drawn = env.random_action(rng)
        assert len(drawn) == len(env.solution) and str(int(drawn)) == drawn
        assert sum(digit != right for digit, right in zip(drawn, env.solution, strict=True)) == 1


def test_it_keeps_the_contract() -> None:
    check_env_contract(RetryEnv, ["1", "2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_digits": 9}, says("num_digits 9", "at most 8")),
        ({"message": "hint"}, says("message", "'hint'", "'fault'", "'neutral'")),
        ({"second_reward": 2}, says("second_reward 2", "at most 1")),
        ({"second_reward": "x"}, says("second_reward", "'x'", "number")),
    ],
)
def test_faulty_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        RetryEnv(**arguments)
