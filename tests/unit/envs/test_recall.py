"""Recall: facts, the note that replaces the old one, and the question."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from messages import says

from turnwise.envs.recall import KIND_OF, KINDS, RecallEnv
from turnwise.errors import EnvironmentFault
from turnwise.testing.env_contract import check_env_contract


def play(env: RecallEnv, seed: int, choose: Any = None) -> tuple[list[str], dict[str, float]]:
    """The observations of an episode, and its last metrics."""
    observations = [env.reset(seed=seed)[0]]
    is_over = False
    metrics: dict[str, float] = {}
    while not is_over:
        action = (choose or env.expert_action)()
        observation, _, is_over, _, info = env.step(action)
        observations.append(observation)
        metrics = info["metrics"]
    return observations, metrics


def test_the_expert_notes_all_facts_and_recalls_the_one_that_is_asked_for() -> None:
    env = RecallEnv(num_facts=4, num_distractors=5)
    for seed in range(50):
        observations, metrics = play(env, seed)
        assert len(observations) == 6 and metrics["success"] == metrics["kept"] == 1.0
        for observation in observations[:4]:
            assert observation.count("Remember ") == 1 and observation.count("The ") == 5
        assert "Remember" not in observations[4], "the question tells nothing again"


def test_the_number_of_distractors_varies_where_questions_are_asked_too() -> None:
    env = RecallEnv(num_facts=3, num_distractors=3, min_distractors=1)
    numbers = set()
    asked = set()
    for seed in range(40):
        observations, _ = play(env, seed)
        numbers |= {observation.count("The ") for observation in observations[:3]}
        asked.add(observations[3].count("The "))
        assert observations[3].endswith("?")
    assert numbers == asked == {1, 2, 3}


def test_facts_of_one_episode_are_of_different_kinds() -> None:
    env = RecallEnv(num_facts=10)
    told = set()
    for seed in range(20):
        env.reset(seed=seed)
        for _ in range(10):
            note = env.expert_action()
            env.step(note)
        words = note.split(",")
        assert len({KIND_OF[word] for word in words}) == len(words) == 10
        told |= set(words)
    assert len(told) > 80, "words vary"


def test_a_note_replaces_the_old_one_and_is_cut() -> None:
    env = RecallEnv(num_facts=3, note_length=4)
    env.reset(seed=1)
    assert "Note:\none,two,three,four\n" in env.step(" one  two three four five")[0]
    observation, *_, info = env.step("six")
    assert "Note:\nsix\n" in observation and "one" not in observation
    assert info["metrics"]["kept"] == 0.0
    observation, reward, is_over, _, info = env.step("")
    assert "Note:\nsix\n" in observation and (reward, is_over) == (0.0, False)
    assert info["metrics"]["action_is_valid"] == 0.0


def test_what_is_kept_counts_whole_facts_of_those_told() -> None:
    env = RecallEnv(num_facts=2)
    env.reset(seed=3)
    first = env.expert_action()
    assert env.step(f"so {first}")[4]["metrics"]["kept"] == 1.0
    assert env.step(first)[4]["metrics"]["kept"] == 0.5


def test_each_right_answer_has_its_part_of_the_reward() -> None:
    env = RecallEnv(num_facts=2, num_questions=5)
    env.reset(seed=3)
    asked, rewards, metrics = set(), [], {}
    for turn in range(7):
        answer = env.expert_action()
        if turn >= 2:
            asked.add(env.state_key().split("|")[1])
        if turn == 4:
            answer = "x"
        _, reward, is_over, _, info = env.step(answer)
        assert is_over == (turn == 6)
        rewards.append(reward)
        metrics = info["metrics"]
    assert rewards == pytest.approx([0, 0, 0.2, 0.2, 0, 0.2, 0.2])
    assert (metrics["success"], metrics["recalled"], metrics["kept"]) == (0.0, 0.8, 1.0)
    assert len(asked) <= 2, "a fact may be asked for again"
    assert env.step("1")[1:3] == (0.0, True), "nothing comes after the last question"


def test_a_wrong_word_has_no_reward() -> None:
    env = RecallEnv(num_facts=2)
    env.reset(seed=3)
    for _ in range(2):
        env.step(env.expert_action())
    right = env.expert_action()
    wrong = next(word for word in KINDS[KIND_OF[right]] if word != right)
    _, reward, is_over, _, info = env.step(wrong)
    assert (reward, is_over, info["metrics"]["success"]) == (0.0, True, 0.0)


def test_the_expert_knows_no_more_than_can_be_seen() -> None:
    env = RecallEnv(num_facts=2)
    env.reset(seed=3)
    first = env.expert_action()
    env.step(first)
    both = env.expert_action()
    [second] = set(both.split(",")) - {first}
    env.reset(seed=3)
    env.step("nothing")
    assert env.expert_action() == second, "what the note lost isn't known any more"
    env.step("")
    asked = env.state_key().split("|")[1].removeprefix("Which ").removesuffix("?")
    assert env.expert_action() == KINDS[asked][0], "nor the word that is asked for"


def test_what_is_told_replaces_what_a_note_says_of_its_kind() -> None:
    env = RecallEnv(num_facts=1)
    for seed in range(40):
        env.reset(seed=seed)
        right = env.expert_action()
        env.note = next(word for word in KINDS[KIND_OF[right]] if word != right)
        assert env.expert_action() == right


def test_a_tokenizer_writes_a_fact_alike_wherever_it_stands() -> None:
    env = RecallEnv(num_facts=3, num_distractors=2)
    rng = random.Random(0)
    actions: list[str] = []

    def acted(choose: Any) -> str:
        actions.append(choose())
        return actions[-1]

    observations, _ = play(env, 7, lambda: acted(env.expert_action))
    observations += play(env, 7, lambda: acted(lambda: env.random_action(rng)))[0]
    text = "\n".join([*observations, *actions])
    places = [found.start() for word in KIND_OF for found in re.finditer(rf"\b{word}\b", text)]
    assert len(places) >= 14 and not any(text[place - 1] == " " for place in places)


def test_no_word_is_of_two_kinds_or_stands_in_sentences_that_do_not_matter() -> None:
    assert len(KIND_OF) == sum(map(len, KINDS.values())) and {len(words) for words in KINDS.values()} == {10}
    env = RecallEnv(num_facts=1, num_distractors=30)
    for seed in range(30):
        told, _ = play(env, seed)
        assert len(set(re.findall(r"\w+", told[0])) & set(KIND_OF)) == 1


def test_without_a_note_nothing_of_earlier_turns_is_shown() -> None:
    env = RecallEnv(num_facts=2, shows_note=False)
    observations, _ = play(env, 5)
    assert not any("Note" in observation for observation in observations)
    assert observations[2].startswith("Which ")
    assert "note" not in env.reset(seed=5)[1]["env_instruction"]


def test_chance_is_a_tenth_whatever_is_noted() -> None:
    env = RecallEnv(num_facts=3)
    rng = random.Random(0)
    results = [play(env, seed, lambda: env.random_action(rng))[1] for seed in range(600)]
    success = sum(metrics["success"] for metrics in results) / len(results)
    assert 0.06 < success < 0.14
    kept = sum(metrics["kept"] for metrics in results) / len(results)
    assert 0.2 < kept < 0.9


def test_facts_of_validation_are_not_those_of_training() -> None:
    def facts(split: Any) -> set[str]:
        env = RecallEnv(num_facts=1, split=split)
        drawn = set()
        for seed in range(200):
            env.reset(seed=seed)
            drawn.add(env.expert_action())
        return drawn

    assert not facts("train") & facts("val")


def test_it_keeps_the_contract() -> None:
    check_env_contract(lambda: RecallEnv(num_facts=2), ["cat", "cat,Oslo", "Oslo"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_facts": 11}, says("num_facts 11", "10")),
        ({"num_distractors": -1}, says("num_distractors -1", "0 or more")),
        ({"num_distractors": 2, "min_distractors": 3}, says("min_distractors 3", "num_distractors", "2")),
        ({"min_distractors": -1}, says("min_distractors -1", "0 to num_distractors")),
        ({"min_distractors": 0.5}, says("min_distractors 0.5", "whole number")),
        ({"note_length": 0}, says("note_length 0", "at least 1")),
        ({"shows_note": "no"}, says("shows_note", "true or false")),
    ],
)
def test_faulty_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        RecallEnv(**arguments)


def test_a_stop_behind_an_answer_does_no_harm() -> None:
    for ending in ("", ".", ".\r\n", "\t"):
        env = RecallEnv(num_facts=2)
        env.reset(seed=2)
        for _ in range(2):
            env.step(env.expert_action())
        assert env.step(env.expert_action() + ending)[1] == 1.0
