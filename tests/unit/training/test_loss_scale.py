"""The factor of a loss in fp16."""

from __future__ import annotations

from turnwise.training.optimizer import LossScale


def test_it_halves_at_an_overflow_and_doubles_after_two_thousand_good_steps() -> None:
    scale = LossScale(is_on=True)
    scale.update(is_skipped=True)
    for _ in range(1999):
        scale.update(is_skipped=False)
    assert scale.factor == 2.0**15
    scale.update(is_skipped=False)
    assert scale.factor == 2.0**16


def test_it_stays_at_one_or_above_and_is_one_in_other_dtypes() -> None:
    scale, off = LossScale(is_on=True), LossScale(is_on=False)
    for _ in range(40):
        scale.update(is_skipped=True)
        off.update(is_skipped=True)
    assert scale.factor == off.factor == 1.0 and scale.is_lowest
    off.load_state_dict({"factor": 8.0, "num_good": 3})
    assert off.factor == 1.0, "a checkpoint of a run in fp16 doesn't scale another dtype"


def test_a_run_that_begins_to_scale_its_loss_starts_at_the_first_factor():
    scale = LossScale(is_on=True)
    scale.load_state_dict(LossScale(is_on=False).state_dict())
    assert scale.factor == LossScale(is_on=True).factor > 1.0
