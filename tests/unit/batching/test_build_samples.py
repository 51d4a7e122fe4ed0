from __future__ import annotations

import numpy as np
import pytest

from turnwise.batching.plan import denominators
from turnwise.batching.samples import build_samples
from turnwise.errors import RolloutError
from turnwise.types import ContextsAre, SamplingParams, Task, Trajectory, Turn, TurnSpan, VersionRun

TASK = Task(id="t", tag="toy", split="train", seed=0)


def turn(prompt: list[int], response: list[int], **fields: object) -> Turn:
    logprobs = np.array([-token / 10 for token in response], np.float32)
    return Turn(
        np.array(prompt), np.array(response, np.int64), logprobs, (VersionRun(4, len(response)),), **fields
    )


def build(*turns: Turn, weight: float = 1.0, contexts_are: ContextsAre = "steps") -> list:
    trajectory = Trajectory(TASK, 0, turns=list(turns), weight=weight, contexts_are=contexts_are)
    return build_samples(trajectory)


def test_turns_are_one_context_with_aligned_arrays() -> None:
    (sample,) = build(turn([1, 2], [3, 4], starts_context=True), turn([5], [6]), weight=0.5)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.response_mask.tolist() == [False, False, True, True, False, True]
    np.testing.assert_allclose(sample.rollout_logprobs, [0, 0, -0.3, -0.4, 0, -0.6], rtol=1e-6)
    assert sample.turn_spans == (TurnSpan(0, 2, 4), TurnSpan(1, 5, 6))
    assert sample.versions == ((VersionRun(4, 2),), (VersionRun(4, 1),))
    assert sample.weight == 0.5 and sample.token_ids.dtype == np.int64


def test_a_turn_that_starts_a_context_ends_the_one_before() -> None:
    first, second = build(turn([1], [2]), turn([3], [4]), turn([7, 8], [9], starts_context=True))
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [7, 8, 9]
    assert second.turn_spans == (TurnSpan(2, 2, 3),)


def test_contexts_of_one_turn_are_samples_that_count_as_sequences_with_the_weight_of_their_trajectory() -> (
    None
):
    samples = build(*(turn([1], [2] * n, starts_context=True) for n in (1, 2, 3)), weight=0.5)
    assert [(sample.num_tokens, sample.weight) for sample in samples] == [(2, 0.5), (3, 0.5), (4, 0.5)]
    counted = denominators(samples, max_length=8)
    assert (counted.num_tokens, counted.num_sequences, counted.num_turns) == (3.0, 1.5, 1.5)


def test_branches_share_their_past_and_each_turn_is_trained_on_once() -> None:
    left, right = build(turn([1], [2]), turn([3], [4]), turn([5], [6], parent=0))
    assert left.token_ids.tolist() == [1, 2, 3, 4]
    assert right.token_ids.tolist() == [1, 2, 5, 6]
    assert left.turn_spans == (TurnSpan(0, 1, 2), TurnSpan(1, 3, 4))
    assert right.turn_spans == (TurnSpan(2, 3, 4),)
    assert right.response_mask.tolist() == [False, False, False, True]
    assert right.rollout_logprobs[1] == 0


def test_samples_say_where_the_temperature_is_not_the_trainer_s() -> None:
    cold, hot = SamplingParams(9, temperature=0.7), SamplingParams(9, temperature=1.3)
    turns = [turn([1], [2], sampling=cold), turn([3], [4, 5], sampling=hot), turn([6], [7])]
    greedy = turn([8], [9], sampling=SamplingParams(9, temperature=0.0), is_greedy=True)

    def temperatures(*turns: Turn, trained: float | None) -> list[float] | None:
        [sample] = build_samples(Trajectory(TASK, 0, turns=list(turns)), trained)
        return None if sample.temperatures is None else sample.temperatures.round(6).tolist()

    assert temperatures(*turns, greedy, trained=0.7) == pytest.approx([0, 0, 0, 1.3, 1.3, 0, 0, 0, 0])
    assert temperatures(*turns, greedy, trained=1.0) == pytest.approx([0, 0.7, 0, 1.3, 1.3, 0, 0, 0, 0])
    assert temperatures(turns[0], turns[2], greedy, trained=0.7) is None
    assert temperatures(*turns, trained=None) is None


def test_greedy_turns_are_read_but_never_trained_on() -> None:
    (sample,) = build(turn([1], [2, 3], is_greedy=True), turn([4], [5]))
    assert sample.response_mask.tolist() == [False, False, False, False, True]
    assert sample.turn_spans == (TurnSpan(1, 4, 5),)
    assert not sample.rollout_logprobs[:4].any()


def test_an_empty_response_has_no_span_and_no_turns_no_samples() -> None:
    (sample,) = build(turn([1, 2], []))
    assert sample.token_ids.tolist() == [1, 2] and sample.turn_spans == ()
    assert build() == []


def test_impossible_histories_are_refused() -> None:
    with pytest.raises(RolloutError, match="earlier turn"):
        build(turn([1], [2]), turn([3], [4], parent=1))
    with pytest.raises(RolloutError, match="without a prompt"):
        build(turn([], [2]))
