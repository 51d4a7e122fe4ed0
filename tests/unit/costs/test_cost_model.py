"""What a run costs, in numbers worked out by hand."""

from __future__ import annotations

import pytest

from turnwise.costs.model import (
    Sampler,
    TokenWork,
    TrainedModel,
    disk_bytes,
    matrix_speed,
    share_done,
    steps_left_s,
    training_seconds,
    work_left_s,
)


def test_bytes_of_a_model_that_is_trained_whole_and_by_adapters() -> None:
    whole = TrainedModel(1000)
    assert (whole.frozen_bytes, whole.trained_bytes, whole.checkpoint_bytes) == (0, 16_000, 12_000)
    adapted = TrainedModel(1000, num_adapter=10)
    assert (adapted.frozen_bytes, adapted.trained_bytes, adapted.checkpoint_bytes) == (4000, 160, 120)
    assert disk_bytes(100, num_kept=2) == 300


def test_a_limit_bounds_the_cache_of_each_server() -> None:
    sampler = Sampler(1000, "bf16", num_servers=3)
    assert sampler.weight_bytes == 6000
    assert sampler.cache_bytes(1000, limit=None) == sampler.cache_bytes(1000, limit=400) == 1000
    assert sampler.cache_bytes(1000, limit=100) == 300


@pytest.mark.parametrize(
    ("work", "operations"),
    [
        (TokenWork(is_sampled=False), 6),
        (TokenWork(is_sampled=True), 8),
        (TokenWork(is_sampled=True, has_reference=True), 10),
        (TokenWork(is_sampled=True, has_reference=True, has_critic=True), 18),
    ],
)
def test_seconds_follow_from_operations_at_a_third_of_a_products_speed(
    work: TokenWork, operations: int
) -> None:
    speed = matrix_speed(size=10, product_s=2.0)
    assert speed == 1000
    assert training_seconds(work, num_parameters=50, num_tokens=20, operations_per_s=speed) == pytest.approx(
        3 * operations
    )


def test_time_left_follows_from_what_is_done() -> None:
    assert share_done(1, 4) == share_done(0, 4, num_tokens=5, most_tokens=20) == 0.25
    assert share_done(0, 0) == 0
    assert work_left_s(30.0, share=0.25) == 90
    assert work_left_s(30.0, share=1.5) == 0
    assert steps_left_s([0.0, 10.0, 20.0], num_left=3, time_s=24.0) == 26
    assert steps_left_s([0.0, 10.0], num_left=1, time_s=99.0) == 0
