"""`reduce_metrics` is the only place that combines measurements, so its rules are pinned here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Metric


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("max", 3.0), ("min", 1.0), ("last", 2.0)])
def test_other_reductions_ignore_the_size_of_weights(reduction, expected):
    metrics = [
        Metric("a", value, reduction, weight) for value, weight in ((1.0, 5.0), (3.0, 1.0), (2.0, 2.0))
    ]
    assert reduce_metrics(metrics) == {"a": expected}


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min", "last"])
def test_weight_zero_does_not_count(reduction):
    metrics = [Metric("a", 4.0, reduction), Metric("a", float("inf"), reduction, weight=0.0)]
    assert reduce_metrics(metrics) == {"a": 4.0}
    assert reduce_metrics([Metric("a", float("nan"), reduction, weight=0)]) == {}


def test_a_percentile_and_an_effective_sample_size_are_those_of_all_values_together():
    values = np.random.default_rng(0).lognormal(size=300)
    for reduction, expected in (
        ("p99", np.percentile(values, 99)),
        ("ess", values.sum() ** 2 / (300 * (values**2).sum())),
    ):
        parts = [values[:7], torch.from_numpy(values[7:299]), values[299:]]
        metrics = [
            Metric("a", part, reduction, weight) for part, weight in zip(parts, (1, 100, 0.1), strict=True)
        ]
        ignored = Metric("a", np.array([1e9]), reduction, weight=0.0)
        assert reduce_metrics([*metrics, ignored]) == {"a": pytest.approx(expected)}


def test_tensors_are_read_in_values_and_weights():
    metrics = [Metric("a", torch.tensor(1.0), weight=torch.tensor(3)), Metric("a", 5.0)]
    reduced = reduce_metrics(metrics)
    assert reduced == {"a": 2.0}
    assert type(reduced["a"]) is float


def test_names_keep_their_order_and_generators_are_accepted():
    assert list(reduce_metrics(Metric(name, 0.0) for name in ("z", "a", "z", "m"))) == ["z", "a", "m"]


def test_one_name_with_two_reductions_is_refused():
    with pytest.raises(ValueError, match=r"'a'.*'mean'.*'max'"):
        reduce_metrics([Metric("a", 1.0), Metric("a", 1.0, "max")])
