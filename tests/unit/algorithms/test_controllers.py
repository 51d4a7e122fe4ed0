from __future__ import annotations

import pytest

from turnwise.algorithms.kl import KLController

BATCHES = [(12.0, 1000), (3.0, 1000), (6.3, 256)]


def test_adaptive_worked_numbers():
    controller = KLController(0.2, target=6.0, horizon=10_000)
    coefs = []
    for kl, num_trajectories in BATCHES:
        controller.update(kl, num_trajectories)
        coefs.append(controller.coef)
    assert coefs == pytest.approx([0.204, 0.19992, 0.2001758976], abs=1e-12)


def test_a_batch_of_many_horizons_keeps_the_coefficient_positive():
    controller = KLController(0.1, target=0.1, horizon=100.0)
    for _ in range(3):
        controller.update(0.0, 1024)
    assert controller.coef == pytest.approx(0.1 * 0.2**3)


def test_a_resumed_controller_goes_on_where_it_was():
    whole = KLController(0.2, 6.0, 10_000)
    for batch in BATCHES:
        whole.update(*batch)

    first = KLController(0.2, 6.0, 10_000)
    first.update(*BATCHES[0])
    second = KLController(0.5, 6.0, 10_000)
    second.load_state_dict(first.state_dict())
    for batch in BATCHES[1:]:
        second.update(*batch)
    assert second.coef == whole.coef


def test_without_a_target_the_coefficient_is_fixed():
    controller = KLController(0.1, None, 10_000)
    controller.update(100.0, 64)
    assert controller.coef == 0.1
    controller.load_state_dict({"coef": 0.3})
    assert controller.state_dict() == {"coef": 0.1}, "the setting's, also where a checkpoint says another"
