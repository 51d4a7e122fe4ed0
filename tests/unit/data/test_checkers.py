"""The checker math_verify: in a process that a limit can end. With the package itself, where it is
installed."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest
from messages import mentions

from turnwise.config import AgenticConfig
from turnwise.config.show.describe import describe
from turnwise.data import checkers
from turnwise.data.checkers import are_correct
from turnwise.data.math_rewards import accuracy, combined, step
from turnwise.errors import ConfigError, NotAvailableError

with_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify isn't installed")
UNEQUAL_TEXT = [
    ("1024", r"\boxed{2^{10}}"),
    (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
]


@with_math_verify
def test_math_verify_knows_what_the_text_reader_does_not():
    truths, answers = zip(*UNEQUAL_TEXT, strict=True)
    assert accuracy(answers, ground_truth=truths) == [0.0] * 3
    assert accuracy(answers, ground_truth=truths, checker="math_verify") == [1.0] * 3
    assert accuracy([r"\boxed{5}", "", r"\boxed{6}"], ["5"] * 3, checker="math_verify") == [1.0, 0.0, 0.0]
    assert (
        combined(answers, truths, weights={"step": 1.0}, checker="math_verify", step_bonus=0.0) == [1.0] * 3
    )


@with_math_verify
def test_it_runs_in_threads():
    scores: list[list[float]] = []

    def score() -> None:
        scores.append(step([r"\boxed{2^{10}}"], ["1024"], checker="math_verify", step_bonus=0.0))

    threads = [threading.Thread(target=score) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [[1.0]] * 3


@with_math_verify
def test_an_answer_that_takes_too_long_is_wrong_and_counted(monkeypatch, caplog):
    process = checkers._MathVerify()
    monkeypatch.setattr(checkers, "_ANSWER_S", 1.0)
    hanging = (r"\boxed{9^{9^{9^{9}}}+1}", r"\boxed{9^{9^{9^{9}}}}")
    monkeypatch.setattr(checkers, "_GROUP_S", 60.0)
    fast = (r"\boxed{2^{10}}", r"\boxed{1024}")
    verdicts = process.verdicts([hanging, None, fast])
    process._end()
    assert verdicts[:2] == [False, True]
    if process.num_too_long:  # a newer math-verify may refuse such a power at once
        assert "count as wrong" in caplog.text


class Hung(checkers._MathVerify):
    """Its process never answers, as one that hangs in a comparison."""

    num_started = 0

    def _started(self):
        Hung.num_started += 1
        self._connection, self.theirs = checkers.Pipe()
        return self._connection


def test_a_hung_process_is_ended_and_its_answers_are_counted_once_each(monkeypatch, caplog):
    monkeypatch.setattr(checkers, "_ANSWER_S", 0.01)
    hung = Hung()
    assert hung.verdicts([("a", "b"), ("a", "b"), None, ("c", "b")]) == [False, False, True, False]
    assert hung.num_too_long == Hung.num_started == 2 and hung._connection is None
    assert caplog.text.count("count as wrong") == 1
    monkeypatch.setattr(checkers, "_GROUP_S", 0.0)
    assert hung.verdicts([("a", "b")]) == [False] and Hung.num_started == 2, "the group's time is over"


def config(**data) -> AgenticConfig:
    return AgenticConfig.model_validate({"pretrain": "model", "data": {"train_files": "rows.jsonl"} | data})


def test_the_checker_stands_in_the_table_of_the_run_and_its_package_is_asked_for_first(monkeypatch):
    assert mentions(dict(describe(config(reward="accuracy")).rows)["rewards"], "accuracy", "text")
    assert "compared" not in dict(describe(config(reward="gsm8k")).rows)["rewards"]
    monkeypatch.setattr(
        "turnwise.config.checks.missing._is_installed", lambda module: module != "math_verify"
    )
    for data in (
        {"reward": "accuracy", "checker": "math_verify"},
        {"reward": [{"name": "step", "args": {"checker": "math_verify"}}]},
    ):
        table = describe(config(**data))
        assert mentions(dict(table.rows)["rewards"], "answers", "math_verify")
        assert any("[math]" in line and "math_verify" in line for line in table.missing)


def test_a_checker_that_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="text or math_verify"):
        are_correct(["5"], ["5"], "sympy")
    monkeypatch.setattr(checkers, "find_spec", lambda name: None)
    with pytest.raises(NotAvailableError, match=r"\[math\]"):
        are_correct(["5"], ["5"], "math_verify")
