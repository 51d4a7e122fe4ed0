"""Reward functions as others write them: what they are called with, what they may return, and what refuses
them."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

import numpy as np
import pytest
import torch
from messages import says
from scored_groups import TASK, group, of, scored

from turnwise.data.forms import as_task
from turnwise.data.math_rewards import accuracy, combined, length_penalty, step
from turnwise.data.reward_calls import warn_once
from turnwise.data.rewards import exact_match, gsm8k
from turnwise.data.tables import TableRow
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.types import Group, Task


def scores(function, *texts: str, form="text", **arguments) -> list[float]:
    played = group(*texts)
    failed = scored(played, (of(function, form, **arguments), 1.0))
    assert not failed, failed[0].error
    return [trajectory.score for trajectory in played.trajectories]


def error(function, form="text") -> str:
    [failed] = scored(group("abc"), (of(function, form), 1.0))
    assert not failed.outcome_rewards
    return str(failed.error)


def test_functions_are_called_by_the_names_of_their_parameters():
    def of_everything(**kwargs):
        assert kwargs["prompts"] == ["Say it"] * 2
        return [
            float(text == right)
            for text, right in zip(kwargs["completions"], kwargs["ground_truth"], strict=True)
        ]

    def of_ids(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    async def of_messages(completions, ground_truth):
        return [
            float(answer[0]["content"] == right)
            for answer, right in zip(completions, ground_truth, strict=True)
        ]

    assert scores(of_everything, "abc", "no") == [1.0, 0.0]
    assert scores(of_ids, "abc", "no") == [1.0, 1.0]
    assert scores(of_messages, "abc", "no", form="messages") == [1.0, 0.0]


def test_completions_as_messages_are_all_that_follows_the_prompt():
    given = {}

    def note(completions, prompts):
        given.update(completions=completions, prompts=prompts)
        return [0.0] * len(completions)

    played = group("abc")
    call = {"role": "assistant", "content": "look", "tool_calls": []}
    result = {"role": "tool", "content": "4"}
    first, last = played.trajectories[0].turns[0], group("abc").trajectories[0].turns[0]
    shot = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": "Say it"},
    ]
    first.messages, last.messages = [*shot, call], [result, {"role": "assistant", "content": "abc<|end|>"}]
    played.trajectories[0].turns.append(last)
    scored(played, (of(note, "messages"), 1.0))
    assert given["completions"] == [[call, result, {"role": "assistant", "content": "abc"}]]
    assert given["prompts"] == [[{"role": "user", "content": "Say it"}]]


def test_the_form_that_a_function_needs_is_named_by_the_error():
    def of_messages(completions):
        return [len(completion[0]["content"]) for completion in completions]

    def of_texts(completions):
        return [float(completion.strip() == "abc") for completion in completions]

    assert "`form: messages`" in error(of_messages)
    assert "{name: of_messages, form: messages}" in error(of_messages)
    assert "`form: text`" in error(of_texts, "messages")


def test_verls_functions_are_called_once_per_completion():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", "abc", {"index": 3})
        length = torch.tensor(float(len(solution_str)))
        return {"score": float(solution_str == ground_truth), "length": length, "pred": solution_str}

    async def later(data_source, solution_str, ground_truth, extra_info):
        return solution_str == ground_truth

    def of_two(solution_str, ground_truth, format_score=0.1, **kwargs):
        assert kwargs == {}
        return 1.0 if solution_str == ground_truth else format_score

    payload = {**TASK.payload, "data_source": "openai/gsm8k", "extra_info": {"index": 3}}
    played = group("abc", "no!!")
    played.task = Task("train/data/0", "data", "train", 1, payload=payload, row=0)
    assert (
        scored(played, (of(compute_score), 1.0), (of(later), 10.0), (of(of_two, format_score=0.5), 100.0))
        == []
    )
    assert [trajectory.score for trajectory in played.trajectories] == [111.0, 50.0]
    metrics = played.trajectories[1].metrics
    assert metrics["reward/compute_score/length"] == 4.0 and "reward/compute_score/pred" not in metrics
    row = TableRow("line 1", {"data_source": "a", "reward_model": {"style": "rule"}})
    with pytest.raises(DataError, match=says("column", "'ground_truth'")):
        of(compute_score).check([row])


def test_a_dict_of_verls_needs_its_score():
    def compute_score(solution_str, ground_truth):
        return {"acc": 1.0}

    assert "`score`" in error(compute_score)


def test_none_adds_nothing_and_somebody_must_score():
    def mine(completions):
        return [None if text == "other" else 1.0 for text in completions]

    def always(completions):
        return [0.25] * len(completions)

    played = group("abc", "other")
    assert scored(played, (of(mine), 2.0), (of(always), 1.0)) == []
    first, second = played.trajectories
    assert first.outcome_rewards == {"mine": 2.0, "always": 0.25} and second.outcome_rewards == {
        "always": 0.25
    }
    assert "reward/mine" not in second.metrics and (first.metrics["success"], second.metrics["success"]) == (
        1.0,
        0.0,
    )
    played = group("abc", "other")
    failed = scored(played, (of(mine), 2.0))
    assert len(failed) == 2 and "None" in str(failed[0].error) and "mine" in str(failed[0].error)
    of_environment = Group(Task("train/Lake/0", "Lake", "train", 1), group("other").trajectories)
    assert scored(of_environment, (of(mine), 2.0)) == [], "an environment has its own reward"


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda queries, prompts, labels: [], "`completions`"),
        (lambda prompts, labels: [], "`ground_truth`"),
        (lambda self, completions: [], "`__call__`"),
    ],
)
def test_parameters_of_other_forms_are_answered_with_the_one_to_use(function, hint):
    with pytest.raises(DataError, match=f"line 1: .*needs the column.*{hint}"):
        of(function).check([TableRow("line 1", {"prompt": "?", "ground_truth": "4"})])


def test_a_decorator_that_hides_the_parameters_is_named():
    def decorated(function):
        return lambda **arguments: function(**arguments)

    @decorated
    def score(completions):
        return [0.0] * len(completions)

    assert "functools.wraps" in error(score)


def test_what_trl_passes_besides_is_filled_or_told(caplog):
    def logging_one(completions, log_metric=None, log_extra=None, trainer_state=None, **kwargs):
        log_metric("mean", np.float32(0.5))
        log_extra("length", [len(text) for text in completions])
        log_extra("text", completions)
        log_extra("listed", [[text] for text in completions])
        return [0.0] * len(completions)

    def needing(completions, trainer_state):
        return [0.0] * len(completions)

    warn_once.cache_clear()
    played = group("abc", "no")
    with caplog.at_level(logging.WARNING):
        assert scored(played, (of(logging_one), 1.0)) == []
    metrics = [trajectory.metrics for trajectory in played.trajectories]
    assert [of_one["reward/logging_one/length"] for of_one in metrics] == [3.0, 2.0]
    assert metrics[0]["reward/logging_one/mean"] == 0.5
    assert [one.comments for one in played.trajectories] == [
        {"logging_one/text": "abc"},
        {"logging_one/text": "no"},
    ]
    assert "trainer_state" in caplog.text and "'listed'" in caplog.text and "'text'" not in caplog.text
    with pytest.raises(ConfigError, match="trainer_state"):
        of(needing)


class Raising:
    def __float__(self) -> float:
        raise KeyError("no such number")


@pytest.mark.parametrize(
    "returned",
    [
        {1.0},
        frozenset({1.0}),
        {"score": 1.0},
        {1.0: 2.0}.keys(),
        "1",
        b"1",
        bytearray(b"1"),
        (1.0 for _ in "a"),
        None,
        1.0,
        ["1"],
        [b"1"],
        [{"score": 1.0}],
        [[1.0, 2.0]],
        np.array(["1"]),
        [np.str_("1")],
        np.array([1 + 2j], np.complex64),
        [1e300],
        [-2e30],
        [float("nan")],
        np.array([np.inf]),
        [10**400],
        torch.ones(1, device="meta"),
        torch.tensor(1.0),
        [Raising()],
        [1.0, 2.0],
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:20]}".replace("/", ""),
)
def test_what_is_no_list_of_numbers_is_refused_with_the_reward_and_the_row(returned):
    def odd(completions):
        return returned

    text = error(odd)
    assert "data.reward odd" in text and "(row 1)" in text


@pytest.mark.parametrize(
    "returned",
    [
        [1],
        (1.0,),
        [True],
        np.array([1.0]),
        [np.float32(1)],
        torch.ones(1),
        [torch.tensor(1)],
        {0: 1.0}.values(),
        [np.bool_(True)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_list_of_any_numbers_is_taken(returned):
    assert scores(lambda completions: returned, "abc") == [1.0]


def test_a_limit_of_time_by_signals_is_named_whether_it_is_caught_or_not(caplog):
    def with_alarm(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [1.0]

    def catching(completions):
        try:
            return with_alarm(completions)
        except ValueError:
            return [0.0]

    async def on_the_loop(completions):
        return with_alarm(completions)

    warn_once.cache_clear()
    told = error(with_alarm)
    assert "async def" in told and "parsing_timeout=None" in told
    with caplog.at_level(logging.WARNING):
        assert scores(catching, "abc") == [0.0]
    [record] = [record for record in caplog.records if "catching" in record.getMessage()]
    assert "SIGALRM" in record.getMessage() and "async def" in record.getMessage()
    before = signal.getsignal(signal.SIGALRM)
    assert scores(on_the_loop, "abc") == [1.0]
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "start", [lambda: signal.alarm(5), lambda: signal.setitimer(signal.ITIMER_REAL, 5.0)]
)
def test_a_timer_of_signals_in_a_thread_does_not_reach_the_run(start, caplog):
    def with_timer(completions):
        start()
        return [1.0]

    def catching(completions):
        signal.alarm(0)
        try:
            start()
        except ValueError:
            return [0.5]
        return [1.0]

    warn_once.cache_clear()
    assert "async def" in error(with_timer) and scores(catching, "abc") == [0.5]
    assert "SIGALRM" in caplog.text and "catching" in caplog.text
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    start()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_reward_that_stops_the_event_loop_fails_its_group_only():
    async def stopping(completions):
        asyncio.get_running_loop().stop()
        return [1.0]

    async def later(completions):
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await asyncio.sleep(0)
        return [1.0]

    with WatchedRunner() as runner:
        assert "event loop" in str(scored_on(runner, stopping).error)
        assert scored_on(runner, later).error is None


def scored_on(runner: WatchedRunner, function):
    from turnwise.data.rewards import RewardManager, WeightedReward

    played = group("abc")
    manager = RewardManager([WeightedReward("f", 1.0, of(function))], 5.0, runner.watchdog)
    runner.run(manager(played))
    return played.trajectories[0]


def positional(completions, /):
    return [0.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (positional, "by name"),
        (lambda *completions: [0.0], "no parameter `completions`"),
        (lambda texts: [0.0], "solution_str"),
        (np.add, "parameters"),
        (torch.ones, "parameters"),
    ],
)
def test_what_cannot_be_called_by_names_is_refused(function, said):
    with pytest.raises(ConfigError, match=said):
        of(function)


def test_half_of_a_character_in_an_exception_is_replaced():
    def odd(completions):
        raise ValueError("\ud800")

    error(odd).encode()


_ALL = (accuracy, length_penalty, step, combined, exact_match, gsm8k)


@pytest.mark.parametrize("function", _ALL, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "truth", [None, [1], {"a": 1}, True, "", " \n", float("nan"), float("inf")], ids=repr
)
def test_a_truth_that_is_no_number_or_text_is_refused_with_row_and_column(function, truth):
    column = "answer" if function is exact_match else "ground_truth"
    rows = [TableRow("rows.jsonl, line 1", {column: "4"}), TableRow("rows.jsonl, line 2", {column: truth})]
    with pytest.raises(DataError, match=says("line 2", f"data.reward {function.__name__}", column)):
        of(function).check(rows)


def test_truths_that_are_numbers_or_texts_are_taken():
    for function in _ALL:
        for truth in ("72", 72, 72.0, "x + 1"):
            of(function).check([TableRow("line 1", {"ground_truth": truth, "answer": truth})])
    of(accuracy).check([TableRow("line 1", {"ground_truth": None, "answer": "4"})])
    of(combined, weights={"format": 1.0}).check([TableRow("line 1", {"prompt": "?"})])
    with pytest.raises(DataError, match="ground_truth or answer"):
        of(combined, weights={"format": 1.0, "step": 1.0}).check([TableRow("line 1", {"prompt": "?"})])


def test_the_true_answer_may_stand_in_either_column():
    assert gsm8k(["#### 72"], answer=["72"]) == exact_match(["72"], ground_truth=["72"]) == [1.0]
    assert gsm8k(["#### 72"], ["72"], ["73"]) == exact_match(["72"], ["72"], ["73"]) == [1.0], (
        "the first is the usual one"
    )
    task = as_task({"instruction": "6 * 12?", "output": "72"}, "alpaca")
    for function in (exact_match, gsm8k):
        of(function).check([TableRow("line 1", task)])
        with pytest.raises(DataError, match="ground_truth"):
            of(function).check([TableRow("line 1", {"prompt": "?"})])
        with pytest.raises(ConfigError, match="ground_truth"):
            function(["72"])


def test_a_required_column_of_nan_is_a_missing_one():
    def score(completions, truth):
        return [0.0]

    with pytest.raises(DataError, match=says("line 7", "data.reward score", "'truth'")):
        of(score).check([TableRow("line 7", {"truth": float("nan")})])


def test_a_partial_and_an_instance_are_functions_too():
    class Score:
        def __call__(self, completions):
            return [0.5] * len(completions)

    def power(completions, base):
        return [base] * len(completions)

    played = group("abc")
    halved, scorer = partial(power, base=2.0), Score()
    halved.__name__, scorer.__name__ = "halved", "scorer"
    assert scored(played, (of(halved), 1.0), (of(scorer), 1.0)) == []
    assert played.trajectories[0].score == 2.5
